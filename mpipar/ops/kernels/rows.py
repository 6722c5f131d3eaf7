"""Rows of tokens on their way to experts and back; rows lo .. hi of the first array are
worked on. Nothing here allocates."""

from mpipar.ops.kernels.compile import kernel
from mpipar.ops.kernels.intrinsics import narrow, real, widen


@kernel("(G[:, ::1], G[:, ::1], i8[::1], i8, i8)")
def gather(out, x, index, lo, hi):
    """out = x[index]"""
    for i in range(lo, hi):
        row = x[index[i]]
        for j in range(out.shape[1]):
            out[i, j] = row[j]


@kernel("(T[:, ::1], T[:, ::1], i8[:, ::1], T[:, ::1], i8, i8)")
def combine(out, rows, places, gates, lo, hi):
    """out[i] += Σ_k gates[i, k] · rows[places[i, k]]; other places are skipped"""
    for i in range(lo, hi):
        for k in range(places.shape[1]):
            place = places[i, k]
            if place < rows.shape[0]:
                row, gate = rows[place], gates[i, k]
                for j in range(out.shape[1]):
                    out[i, j] += gate * row[j]


@kernel(
    "(O[:, ::1], O[:, ::1], T[:, ::1], i8[::1], i8[::1], T[:, ::1], T[:, ::1], i8, i8)"
)
def combine_back(dx, dy, rows, tokens, slots, gates, dgates, lo, hi):
    """dx = gates[tokens, slots] · dy[tokens], dgates[tokens, slots] = Σ dy · rows"""
    for i in range(lo, hi):
        token, slot = tokens[i], slots[i]
        gate, d, row = gates[token, slot], dy[token], rows[i]
        total = real(0.0, gate)
        for j in range(dx.shape[1]):
            wide = widen(d[j], gate)
            total += wide * row[j]
            dx[i, j] = narrow(gate * wide, dx[i, j])
        dgates[token, slot] = total
