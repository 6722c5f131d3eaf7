// Stochastic rounding to 16 bits (Gupta et al. 2015): a uniform number below one unit of
// the last place is added, and the rest is cut off. NaN stays NaN.

__device__ inline void put_drawn(bf16& to, float x, uint32 word) {
    const uint32 bits = __float_as_uint(x);
    to.bits = (unsigned short)(x == x ? (bits + (word >> 16)) >> 16 : 0x7fc0u);
}
// 10 bits of a mantissa stay beside the leading one; fewer of a number that is too small
// for that: its last place is 2^-24. In integers, as tiny floats may count as 0.
__device__ inline void put_drawn(fp16& to, float x, uint32 word) {
    const uint32 bits = __float_as_uint(x);
    const int exponent = bits >> 23 & 0xff;
    const int tiny = exponent < 63 ? 63 : 126 - exponent;
    const int dropped = exponent < 113 ? tiny : 13;
    const uint64 mantissa = bits & 0x7fffffu | 0x800000u;
    uint32 kept = uint32(((mantissa << 32 >> dropped) + word) >> 32);
    if (exponent > 113) kept += uint32(exponent - 113) << 10;
    if (exponent > 142) kept = x == x ? 0x7c00u : 0x7e00u;
    to.bits = (unsigned short)(kept | (bits >> 16 & 0x8000u));
}

// out = x for the elements begin .. begin + size of a rank's box of a tensor. Element e
// of the box has index i = first + e / width * stride + e % width in the tensor, and
// takes word i % 4 of counter (i / 4, step). Neighbours share the words of a counter.
template <class H>
__global__ void round_stochastic(int64 size, const float* x, H* out, int64 begin,
                                 int64 first, int64 width, int64 stride, int64 step,
                                 int64 key0, int64 key1) {
    const int lanes = ITEMS<float>;
    for_all<lanes>(size, phase_of<lanes>(x, out), [&](int64 at, auto n) {
        const int64 row = (begin + at) / width;
        int64 column = begin + at - row * width;
        int64 index = first + row * stride + column;
        const auto items = load(x + at, n);
        Vector<H, n> narrow;
        uint32 word[4];
        for (int k = 0; k < n; ++k) {
            if (k == 0 || column == 0 || index % 4 == 0) {
                word[0] = uint32(index >> 2), word[1] = uint32(index >> 34);
                word[2] = uint32(step), word[3] = uint32(step >> 32);
                philox(word, uint32(key0), uint32(key1));
            }
            const int own = int(index % 4);
            const uint32 drawn = own == 0   ? word[0]
                                 : own == 1 ? word[1]
                                 : own == 2 ? word[2]
                                            : word[3];
            put_drawn(narrow[k], items[k], drawn);
            ++column, ++index;
            if (column == width) column = 0, index += stride - width;
        }
        save(out + at, narrow);
    });
}
