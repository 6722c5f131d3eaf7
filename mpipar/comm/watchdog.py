"""Ends a job that waits in vain, and says who did not come, and where they are.

One thread per process. It makes no MPI calls: the watchdogs of the ranks talk by UDP,
so they answer whatever MPI is doing. Once the own rank has been inside one operation
for longer than the patience, its watchdog asks the other members of the axis what they
are doing, prints one report, and aborts the job with exit status 4. It does the same
where a file keeps the rank for so long, and then asks everybody.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpipar.comm import mpi
from mpipar.comm.addresses import own_addresses
from mpipar.comm.calls import COLLECTIVE, Call, CallLog
from mpipar.comm.filework import FileWork, held_up
from mpipar.comm.processes import Process, describe, own_process
from mpipar.comm.sources import source_line
from mpipar.comm.verdict import (
    Answer,
    Held,
    has_come,
    report,
    report_on_file,
    waits_elsewhere,
    waits_here,
)

_REPEAT_S = 0.4  # a question without an answer is asked again after so long
_ANSWER_S = 2.0  # a watchdog that has not answered by then is given up
_TURN_S = 3.0  # how long a rank lets those speak first that know more
_CROWD = 64  # at most so many ranks question an axis at the same time
_EXIT = 4


@dataclass(slots=True)
class Case:
    """The inquiry into one call that takes too long, or into work on a file."""

    call: Call
    work: FileWork | None
    started: float
    opened: float
    asked: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)
    hold_until: float | None = None


class Watchdog:
    """Watches the calls in ``log``; made and closed by all ranks of ``world`` together.

    world      the MPI communicator whose ranks name the members of every call
    timeout_s  how long one operation may take
    one_node   True when all ranks share a machine: nothing then leaves it
    """

    def __init__(
        self, world: mpi.Comm, log: CallLog, timeout_s: float, one_node: bool
    ) -> None:
        self._rank = world.rank
        self._log = log
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1" if one_node else "0.0.0.0", 0))
        self._port = self._socket.getsockname()[1]
        addresses = ["127.0.0.1"] if one_node else own_addresses()
        self._contacts = world.allgather((addresses, self._port))
        self._processes = [Process(*p) for p in world.allgather(tuple(own_process()))]
        self._token = world.bcast(secrets.token_hex(16))
        self._own = self._processes[self._rank]
        self._watched = threading.get_ident()
        self._case: Case | None = None
        self._hushed = False
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name="mpipar-watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the socket."""
        self._stopping = True
        self._socket.sendto(b"", ("127.0.0.1", self._port))
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stopping:
            self._socket.settimeout(0.2 if self._case else min(0.5, self._timeout_s))
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                data = b""
            except OSError:  # an earlier datagram found nobody
                continue
            if data:
                self._receive(data)
            self._look(time.perf_counter())

    # Asking and answering

    def _receive(self, data: bytes) -> None:
        """Answer a question, or file an answer; anything else is not for us."""
        try:
            message = json.loads(data)
            if message["token"] != self._token or message["to"] != self._rank:
                return
            if message["kind"] == "ask":
                self._answer(message)
            elif message["kind"] == "hush":
                self._hushed = True
            elif self._case and message["case"] == self._case.opened:
                answer = Answer(**message["answer"])
                held = answer.held and Held(*answer.held)
                self._case.answers[message["from"]] = answer._replace(held=held)
        except (ValueError, TypeError, KeyError):
            return

    def _ask(self, case: Case, now: float) -> None:
        """Question those who have not answered; now and then, as datagrams get lost."""
        if now < case.asked + _REPEAT_S:
            return
        case.asked = now
        for rank in case.call.members:
            if rank != self._rank and rank not in case.answers:
                question = {
                    "case": case.opened,
                    "axis": case.call.axis,
                    "channel": case.call.channel,
                    "sequence": case.call.sequence,
                }
                self._send(rank, "ask", question)

    def _answer(self, question: dict) -> None:
        channel = self._log.channels.get((question["axis"], question["channel"]))
        collectives = self._log.channels.get((question["axis"], COLLECTIVE))
        call = self._log.current or self._log.oldest_queued()
        held = held_up(self._watched)
        answer = Answer(
            host=self._own.host,
            where=source_line(self._watched),
            count=channel.count if channel else 0,
            op=channel.op_at(question["sequence"]) if channel else None,
            last=collectives.recent[-1] if collectives and collectives.count else None,
            inside=call and (call.axis, call.channel, call.op, call.sequence),
            inside_s=time.perf_counter() - call.started if call else 0.0,
            partners=list(call.members) if call and len(call.members) < _CROWD else [],
            held=held and _held(held[0]),
        )
        body = {"case": question["case"], "answer": answer._asdict()}
        self._send(question["from"], "tell", body)

    def _send(self, rank: int, kind: str, body: dict) -> None:
        message = {"token": self._token, "kind": kind, "from": self._rank, "to": rank}
        data = json.dumps(message | body).encode()
        addresses, port = self._contacts[rank]
        for address in addresses:
            try:
                self._socket.sendto(data, (address, port))
            except OSError:  # not reachable that way
                continue

    # Judging

    def _look(self, now: float) -> None:
        """Open, drop or close the case of what takes this rank too long."""
        found = self._overdue(now)
        if found is None:
            self._case = None
            return
        case, (call, work) = self._case, found
        same = case is not None and case.work is work and case.started == call.started
        if not same or (work is None and case.call is not call):
            case = self._case = Case(call, work, call.started, opened=now)
            self._ask(case, now)
        elif self._is_complete(case, now):
            self._close_case(case, now)
        else:
            self._ask(case, now)

    def _overdue(self, now: float) -> tuple[Call, FileWork | None] | None:
        """The call that this rank is inside of, or the work on a file that keeps it, as
        a call of everybody; None while there is patience."""
        held = held_up(self._watched)
        if held is not None:
            work, since = held
            everybody = range(len(self._contacts))
            if now - since >= self._patience(everybody):
                return Call("", "files", work.verb, 0, 0, everybody, since), work
        for call in (self._log.current, self._log.oldest_queued()):
            if call is not None and now - call.started >= self._patience(call.members):
                return call, None
        return None

    def _patience(self, members: Sequence[int]) -> float:
        """Seconds that an operation of so many ranks may take."""
        if len(members) <= _CROWD:
            return self._timeout_s
        place = list(members).index(self._rank)
        return self._timeout_s + _TURN_S * (place // _CROWD).bit_length()

    def _is_complete(self, case: Case, now: float) -> bool:
        if case.hold_until is not None:
            return now >= case.hold_until
        others = len(case.call.members) - 1
        return len(case.answers) == others or now >= case.opened + _ANSWER_S

    def _close_case(self, case: Case, now: float) -> None:
        """Speak, or first let a rank speak that is closer to the cause."""
        if case.hold_until is None and not self._speaks_first(case):
            # Ranks that wait for each other hold back for different times
            case.hold_until = now + _TURN_S + min(self._rank, 10)
            case.answers.clear()
            case.asked = 0.0
        elif not self._hushed:
            for rank in range(len(self._contacts)):
                if rank != self._rank:
                    self._send(rank, "hush", {})
            sys.__stderr__.write(self._report(case, now))
            sys.__stderr__.flush()
            time.sleep(1)  # launchers drop what they have not read when a job aborts
            end_job()

    def _report(self, case: Case, now: float) -> str:
        if case.work is not None:
            held = _held(case.work)
            return report_on_file(held, case.answers, self._rank, self._own.host)
        return report(
            case.call,
            case.answers,
            self._rank,
            source_line(self._watched),
            now - case.started,
            lambda rank: describe(self._processes[rank], self._own),
            self._entered,
        )

    def _entered(self, axis: str, channel: str) -> int:
        found = self._log.channels.get((axis, channel))
        return found.count if found else 0

    def _speaks_first(self, case: Case) -> bool:
        if case.work is not None:
            answers = case.answers.items()
            if any(a.inside is not None and a.inside_s >= 1 for _, a in answers):
                return False  # it waits for one of us, and says so
            return self._rank <= min((r for r, a in answers if a.held), default=1 << 31)
        missing = [a for a in case.answers.values() if not has_come(case.call, a)]
        waiting = [r for r, a in case.answers.items() if waits_here(case.call, a)]
        lowest = min(waiting, default=self._rank)
        return self._rank <= lowest and not any(
            waits_elsewhere(case.call, answer) for answer in missing
        )


def _held(work: FileWork) -> Held:
    seconds = time.perf_counter() - work.since
    return Held(work.verb, str(work.path), source_line(work.thread), seconds)


def end_job() -> None:
    """Abort the whole job, from any thread; never returns.

    Abort keeps the interpreter to itself, so what ends this process if it hangs must
    need no interpreter. It may also come back before the launcher has acted.
    """
    faulthandler.dump_traceback_later(5, exit=True, file=sys.__stderr__)
    mpi.COMM_WORLD.Abort(_EXIT)
    time.sleep(4)
    os._exit(_EXIT)
