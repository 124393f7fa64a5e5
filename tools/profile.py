"""Shows where the time of the steps of log.profile went, on every rank: a table, a picture and a trace."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "profile":
    # Python looks for modules beside a program that it runs, before its own. So another program of this folder finds
    # this file where cProfile imports the module `profile` of the standard library, which is put in its place.
    _path = Path(sysconfig.get_path("stdlib")) / "profile.py"
    _spec = importlib.util.spec_from_file_location("profile", _path)
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["profile"] = _module
    _spec.loader.exec_module(_module)
else:
    from megapar_tools.trace.profile_report import main

    if __name__ == "__main__":
        main()
