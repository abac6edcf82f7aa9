"""The laws every connection obeys: one suite of tests over every method that `make` knows.

    pytest --pyargs crosslayer.testing.laws -k laurel

A new file in connections/ is covered as soon as it exists, and so is the method of an installed
package. Most laws are checked for the default options of every method; those that options can break
are also checked for the class's `test_variants`.
"""

from .shared import *  # noqa: F403
from .test_class import *  # noqa: F403
from .test_derivatives import *  # noqa: F403
from .test_descriptions import *  # noqa: F403
from .test_execution import *  # noqa: F403
from .test_initial_function import *  # noqa: F403
from .test_parameters import *  # noqa: F403
from .test_precision import *  # noqa: F403
from .test_state import *  # noqa: F403
