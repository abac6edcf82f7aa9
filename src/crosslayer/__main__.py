"""`python -m crosslayer`, which torchrun can start."""

import sys

from .cli.main import main

sys.exit(main())
