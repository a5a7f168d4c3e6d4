"""Whether a job's programs may import an installed Horovod instead of Rankless's API."""

import os

from rankless.config.environment import alias_choice
from rankless.config.run_config import Program
from rankless.extensions.horovodrun.run_config import is_this_python
from rankless.runtime.hooks.import_aliases import install

VARIABLE = "RANKLESS_HOROVOD"


def may_be_imported(program: Program) -> bool:
    """Whether `import horovod` may find an installed one.

    True if one is installed here, or if another Python runs the program, whose packages are unknown.
    """
    if install().is_real_package("horovod"):
        return True
    is_python = program.kind == "command" and os.path.basename(program.target).startswith("python")
    return is_python and alias_choice(VARIABLE) == "missing" and not is_this_python(program.target)
