// What tensor cores do, by an exchange between the lanes of a warp: included by programs
// of 16-bit tiles in the place of instructions.
#pragma once

namespace shim {

// What each lane of a warp shows to the others; two of it, used in turn.
struct Shown {
    float a[8], b[4];
    const void* row;
};
Shown shown[32][2][32];

inline const Shown* show(const Shown& own) {
    Warp& warp = warps[current / 32];
    const unsigned side = warp.meeting.turn & 1;
    shown[current / 32][side][current % 32] = own;
    meet(warp.meeting);
    return shown[current / 32][side];
}

template <class S> float half_of(unsigned word, int place) {
    S x;
    x.bits = (unsigned short)(word >> (16 * place));
    return wide(x);
}

}  // namespace shim

inline void load_matrices(uint32 (&m)[4], const void* row) {
    const unsigned lane = shim::current % 32;
    const shim::Shown* all = shim::show({{}, {}, row});
    for (int i = 0; i < 4; ++i)
        memcpy(&m[i], static_cast<const char*>(all[8 * i + lane / 4].row) + lane % 4 * 4,
               4);
}
inline void load_transposed(uint32 (&m)[4], const void* row) {
    const unsigned lane = shim::current % 32;
    const shim::Shown* all = shim::show({{}, {}, row});
    for (int i = 0; i < 4; ++i) {
        unsigned short items[2];
        for (int j = 0; j < 2; ++j)
            items[j] = static_cast<const unsigned short*>(
                all[8 * i + lane % 4 * 2 + j].row)[lane / 4];
        m[i] = items[0] | unsigned(items[1]) << 16;
    }
}
template <class S>
void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, S) {
    shim::Shown own = {};
    for (int i = 0; i < 8; ++i) own.a[i] = shim::half_of<S>(a[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) own.b[i] = shim::half_of<S>(i < 2 ? b0 : b1, i % 2);
    const unsigned lane = shim::current % 32;
    const shim::Shown* all = shim::show(own);
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            // Places 0, 1 of a: columns from 0; 2, 3: eight rows on; 4 to 7: from 8 on
            const shim::Shown& left = all[lane / 4 * 4 + k % 8 / 2];
            const shim::Shown& right = all[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2];
            c[i] += left.a[k / 8 * 4 + i / 2 * 2 + k % 2] * right.b[k / 8 * 2 + k % 2];
        }
}
