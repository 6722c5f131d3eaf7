"""One part of the run, in a process of its own: python -m gpu.run.part NAME ..."""

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from gpu.run.record import Records, Setting


def main() -> None:
    """Run the part; checks that fail are records, not exit statuses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="of the part")
    parser.add_argument("module", help="that has its checks")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--mpi", action="store_true", help="started by mpiexec")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    comm = None
    if args.mpi:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    until = time.monotonic() + args.seconds
    setting = Setting(args.dry_run, until, args.scratch, comm)
    apart = {}
    if comm is not None and comm.size > 1:
        apart = {"silent": comm.rank > 0, "give_up": lambda: comm.Abort(1)}
    records = Records(args.records, args.name, **apart)
    if comm is not None:
        # Before the first rank writes more
        records.seen = comm.bcast(records.seen)
    try:
        import_module(f"gpu.run.{args.module}").run(setting, records)
    except BaseException:
        if comm is not None:
            import traceback

            traceback.print_exc()
            # The others would wait for this rank for ever.
            comm.Abort(1)
        raise
    if comm is None:
        # Destructors of a device that has failed may hang; all is written.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
