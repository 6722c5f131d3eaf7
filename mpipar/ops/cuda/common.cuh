// What all kernels share. A program is this text and one .cu file. It includes no
// header, so that the compiler needs none.
//
// C is the compute type, float or double: of sums and of the residual stream. S is the
// type that arrays of operands are stored in: C itself, or a 16-bit type.
// Offsets are 64-bit; counts that fit one row are int.

typedef long long int64;
typedef unsigned int uint32;
typedef unsigned long long uint64;

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

// Memory of a block whose size the launch gives.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(T, name)                                     \
    extern __shared__ __align__(16) unsigned char shared_bytes[];   \
    T* name = reinterpret_cast<T*>(shared_bytes)
#endif

// --- 16-bit floats: rounded once, to the nearest even; NaN stays NaN ---------------

__device__ inline double wide(double x) { return x; }
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(bf16 x) { return __uint_as_float(uint32(x.bits) << 16); }
__device__ inline float wide(fp16 x) {
    float y;
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
#else
    y = *reinterpret_cast<_Float16*>(&x.bits);
#endif
    return y;
}

__device__ inline void put(double& to, double x) { to = x; }
__device__ inline void put(float& to, float x) { to = x; }
__device__ inline void put(bf16& to, float x) {
    uint32 bits = __float_as_uint(x);
    uint32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = (unsigned short)(x == x ? rounded : 0x7fc0u);
}
__device__ inline void put(fp16& to, float x) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    *reinterpret_cast<_Float16*>(&to.bits) = _Float16(x);
#endif
}

// --- several items at a time ---------------------------------------------------------

// Items of the compute type that one access of 16 bytes moves
template <class C> constexpr int ITEMS = 16 / sizeof(C);

// A count that is known when the kernel is compiled.
template <int n> struct Count {
    __device__ constexpr operator int() const { return n; }
};

template <class T, int n> struct alignas(sizeof(T) * n) Vector {
    T item[n];
    __device__ T& operator[](int i) { return item[i]; }
    __device__ const T& operator[](int i) const { return item[i]; }
};
// What one access moves
template <int bytes> struct Word { struct type { uint4 half[2]; }; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef uint32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };
// Tests put a check of the address in its place.
#ifndef WORD_AT
#define WORD_AT(word, at) (*reinterpret_cast<word*>(at))
#endif

template <class T, int n> __device__ Vector<T, n> load(const T* at, Count<n>) {
    typedef const typename Word<sizeof(T) * n>::type From;
    const From word = WORD_AT(From, at);
    Vector<T, n> x;
    memcpy(&x, &word, sizeof(x));
    return x;
}
// To shared memory.
template <class T, int n> __device__ void keep(T* at, const Vector<T, n>& x) {
    typename Word<sizeof(T) * n>::type word;
    memcpy(&word, &x, sizeof(x));
    WORD_AT(decltype(word), at) = word;
}

// To global memory. The compiler would take an assignment apart inside of loops.
template <class T, int n> __device__ void save(T* at, const Vector<T, n>& x) {
    const int bytes = sizeof(T) * n;
    typedef typename Word<(bytes < 16 ? bytes : 16)>::type Part;
    Part parts[(bytes + 15) / 16];
    memcpy(parts, &x, bytes);
    for (int i = 0; i < (bytes + 15) / 16; ++i)
        __stwb(&WORD_AT(Part, reinterpret_cast<Part*>(at) + i), parts[i]);
}

// How many items before an address an n-fold access could begin; −1 where that is not
// the same for all of them. Null pointers do not count.
template <int n> __device__ int phase_of() { return 0; }
template <int n, class T, class... More>
__device__ int phase_of(const T* at, const More*... more) {
    const int own = int(reinterpret_cast<uint64>(at) / sizeof(T) % n);
    const bool same = (true && ... && (!more || int(reinterpret_cast<uint64>(more) /
                                                    sizeof(More) % n) == own));
    return same ? own : -1;
}

// work(i, Count) for the items i .. i + Count of 0 .. size, by `threads` threads in
// turn: n at a time where they lie together in memory, else one by one.
template <int n, class I, class Work>
__device__ void for_items(I size, int phase, I thread, I threads, Work work) {
    I low = size, high = size;
    if (phase >= 0) {
        low = I((n - phase) % n) < size ? I((n - phase) % n) : size;
        high = low + (size - low) / n * n;
    }
    for (I i = thread; i < low; i += threads) work(i, Count<1>());
    for (I i = low + thread * n; i < high; i += threads * n) work(i, Count<n>());
    for (I i = high + thread; i < size; i += threads) work(i, Count<1>());
}

// The same by all threads of all blocks.
template <int n, class Work>
__device__ void for_all(int64 size, int phase, Work work) {
    const int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    for_items<n>(size, phase, first, int64(gridDim.x) * blockDim.x, work);
}

// Of one row, by the threads that work on it.
template <int n, class Work>
__device__ void for_row(int width, int phase, Work work) {
    for_items<n>(width, phase, int(threadIdx.x), int(blockDim.x), work);
}

// --- rows: one for each block, or for each warp of a block of several ---------------

__device__ inline int64 own_row() {
    return int64(blockIdx.x) * blockDim.y + threadIdx.y;
}

// Waits for the threads of a row.
__device__ inline void row_wait() {
    if (blockDim.x == 32)
        __syncwarp();
    else
        __syncthreads();
}

// --- reductions over the threads of a row, whole warps; every thread gets the result

struct Add {
    template <class C> static __device__ C join(C a, C b) { return a + b; }
};
// The larger one; NaN if either is.
struct Max {
    template <class C> static __device__ C join(C a, C b) {
        return b > a || b != b ? b : a;
    }
};

template <class Op, class C> __device__ C warp_reduce(C x) {
    for (int lanes = 16; lanes > 0; lanes >>= 1)
        x = Op::join(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// Several numbers at once.
template <class Op, class C, int count> __device__ void row_reduce(C (&x)[count]) {
    for (int i = 0; i < count; ++i) x[i] = warp_reduce<Op>(x[i]);
    if (blockDim.x == 32) return;
    __shared__ C of_warp[count][32];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    __syncthreads();  // until all have read the results of the call before
    if (lane == 0)
        for (int i = 0; i < count; ++i) of_warp[i][threadIdx.x >> 5] = x[i];
    __syncthreads();
    for (int i = 0; i < count; ++i) {
        x[i] = of_warp[i][0];
        for (int warp = 1; warp < warps; ++warp)
            x[i] = Op::join(x[i], of_warp[i][warp]);
    }
}
template <class Op, class C> __device__ C row_reduce(C x) {
    C one[1] = {x};
    row_reduce<Op>(one);
    return one[0];
}
