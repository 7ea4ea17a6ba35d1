"""Python imports this at every start where its folder is on PYTHONPATH; without MOONSHIFT_CHAOS it does nothing.

A process of a run (the driver, a Ray worker) loads `tests/chaos/injector.py` from here, before any other code runs.
"""

import os
import sys

if os.environ.get("MOONSHIFT_CHAOS"):
    _command = " ".join(sys.orig_argv)
    _role = "driver" if "moonshift.flows.cli" in _command else "worker" if "default_worker.py" in _command else None
    if _role is not None:
        import importlib.util

        _place = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "injector.py")
        _spec = importlib.util.spec_from_file_location("moonshift_chaos_injector", _place)
        assert _spec is not None and _spec.loader is not None
        _module = importlib.util.module_from_spec(_spec)
        sys.modules[_spec.name] = _module
        _spec.loader.exec_module(_module)
        _module.install(os.environ["MOONSHIFT_CHAOS"], _role)
