"""`python -m crosslayer`, and so `torchrun … -m crosslayer`."""

import sys

from .cli.main import main

sys.exit(main())
