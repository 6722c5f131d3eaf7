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

// --- reductions over a block of whole warps; every thread gets the result ----------

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

template <class Op, class C> __device__ C block_reduce(C x) {
    __shared__ C of_warp[32];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    x = warp_reduce<Op>(x);
    __syncthreads();  // until all have read the results of the call before
    if (lane == 0) of_warp[threadIdx.x >> 5] = x;
    __syncthreads();
    x = of_warp[0];
    for (int warp = 1; warp < warps; ++warp) x = Op::join(x, of_warp[warp]);
    return x;
}
