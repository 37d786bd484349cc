"""Start of Python in a copy without extensions/: hides those that an editable install would find."""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("/extensions")]
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in str(finder)]
