"""`python -m crosslayer`, and so `torchrun … -m crosslayer`."""

import sys

from .cli import main

sys.exit(main())
