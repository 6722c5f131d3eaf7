"""Plants faults into the ranks of a run; the program itself knows nothing of it.

MPIPAR_TEST_FAULT holds "module:attribute:rank:kind:call", several with spaces between.

module     wrapped once it has been imported, at once where it is there already
attribute  function or Class.method; left out, the fault happens on import
rank       as the launcher counts, or * for all
kind       raise     RuntimeError
           oserror   OSError, as from a full disk
           exit      sys.exit(3)
           kill      SIGKILL to the own process
           stop      SIGSTOP to the own process
           term      SIGTERM to the own process;  usr1  SIGUSR1
           loop      computes for ever
           block     waits for ever, as for a file system that does not answer
           slow      two seconds of sleep, then as always
           lag       a quarter of a second of sleep, then as always
           skip      returns the first argument, does nothing
           extra     calls the barrier of the first argument, then as always
           atexit    RuntimeError in an exit handler
           hasten    for Watchdog._overdue: little patience once a fault has happened,
                     while a machine may be slow to start a run
           small     no file may grow beyond 4 KiB from here on
call       which call it happens in, from 1; * is every call

The time of each fault goes to the file "fault" in the job's folder.
"""

import atexit
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from functools import wraps

_RANK = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"


_SLEEPS = {"slow": 2, "lag": 0.25}


def _fail():
    raise RuntimeError("planted fault")


def _mark():
    return os.path.join(os.environ["MPIPAR_TEST_JOB"], "fault")


def _hasten(watchdog):
    if os.path.exists(_mark()):
        watchdog._timeout_s = 5.0


def _happen(kind):
    with open(_mark(), "a") as file:
        file.write(f"{time.time()}\n")
    if kind == "raise":
        raise RuntimeError("planted fault")
    if kind == "oserror":
        raise OSError(28, "planted: no space left on device")
    if kind == "exit":
        sys.exit(3)
    if kind in ("kill", "stop", "term", "usr1"):
        os.kill(os.getpid(), getattr(signal, f"SIG{kind.upper()}"))
    while kind == "loop":
        pass
    if kind == "block":
        threading.Event().wait()
    if kind in _SLEEPS:
        time.sleep(_SLEEPS[kind])
    if kind == "atexit":
        atexit.register(_fail)
    if kind == "small":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def _plant(module, attribute, kind, call):
    holder = module
    *path, name = attribute.split(".")
    for part in path:
        holder = getattr(holder, part)
    original = getattr(holder, name)
    calls = 0

    @wraps(original)
    def faulty(*args, **named):
        nonlocal calls
        calls += 1
        if kind == "hasten":
            _hasten(args[0])
        elif call in ("*", str(calls)):
            _happen(kind)
            if kind == "skip":
                return args[1]
            if kind == "extra":
                args[0].barrier()
        return original(*args, **named)

    setattr(holder, name, faulty)


class _Planter:
    """Finds modules as always, and wraps what a fault names in them."""

    def __init__(self, faults):
        self.faults = faults

    def find_spec(self, name, path=None, target=None):
        mine = [fault for fault in self.faults if fault[0] == name]
        if not mine:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for _, attribute, _, kind, call in mine:
                if attribute:
                    _plant(module, attribute, kind, call)
                else:
                    _happen(kind)

        spec.loader.exec_module = exec_module
        return spec


_FAULTS = [f.split(":") for f in os.environ.get("MPIPAR_TEST_FAULT", "").split()]
_FAULTS = [fault for fault in _FAULTS if fault[2] in (_RANK, "*")]
for _name, _attribute, _, _kind, _call in _FAULTS:
    if _name in sys.modules:
        _plant(sys.modules[_name], _attribute, _kind, _call)
if _FAULTS:
    sys.meta_path.insert(0, _Planter(_FAULTS))
