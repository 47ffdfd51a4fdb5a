// What all kernels share: types, warp and block sums, activations, half precision.
//
// The files here are compiled twice: by NVRTC, without any header of a toolkit, and by a host C++ compiler, where
// `EMULATED` is defined and `emulator.h` gives the words of CUDA a meaning. Multiply-adds are fused only where
// `fmaf` is written (NVRTC runs with --fmad=false), sums have one order, and no float is added atomically: the same
// inputs give the same bits at every launch.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef EMULATED
#include "emulator.h"
#else
#define KERNEL(threads, name) extern "C" __global__ void __launch_bounds__(threads) name
#define SHARED(type, name, n) __shared__ type name[n]
#endif

#define DEVICE static __device__ __forceinline__
// For long functions that unrolled code uses: one copy of them, which is called.
#define DEVICE_APART static __device__ __noinline__
#define FULL_WARP 0xffffffffu

struct alignas(16) Quad {
    float v[4];
};

DEVICE u32 float_bits(float f) {
    return __float_as_uint(f);
}

DEVICE float bits_float(u32 u) {
    return __uint_as_float(u);
}

DEVICE float negative_infinity() {
    return bits_float(0xff800000u);
}

// f16 to f32: exact.
DEVICE float half_to_float(u16 h) {
#ifdef __CUDA_ARCH__
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
#else
    u32 sign = (u32)(h & 0x8000) << 16;
    if ((h & 0x7c00) == 0x7c00) {
        return bits_float(sign | 0x7f800000u | (u32)(h & 0x3ff) << 13);
    }
    // The exponents differ by 2^112 in their bias; the product is exact, subnormal numbers included.
    float magnitude = bits_float((u32)(h & 0x7fff) << 13) * bits_float((127 + 112) << 23);
    return bits_float(float_bits(magnitude) | sign);
#endif
}

// f32 to f16: to nearest, ties to even.
DEVICE u16 float_to_half(float f) {
#ifdef __CUDA_ARCH__
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
#else
    u32 bits = float_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return (u16)(0x7fff);
    }
    if (magnitude >= 0x477ff000) {
        return (u16)(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) {
        // Subnormal: the sum with 0.5 has its last bit at 2^-24.
        u32 rounded = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000;
        return (u16)(sign | rounded);
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (u16)(sign | ((magnitude - 0x38000000) >> 13));
#endif
}

DEVICE float bfloat_to_float(u16 b) {
    return bits_float((u32)b << 16);
}

// Four floats at a multiple of 16 bytes.
DEVICE Quad load_quad(const float* p) {
    return *(const Quad*)p;
}

DEVICE bool is_aligned(const void* p) {
    return ((u64)p & 15) == 0;
}

// Sum of the products of four signed bytes each, plus `sum`.
DEVICE int dot4(int a, int b, int sum) {
#ifdef __CUDA_ARCH__
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
#else
    for (int i = 0; i < 4; i++) {
        sum += (int)(i8)(a >> (8 * i)) * (int)(i8)(b >> (8 * i));
    }
    return sum;
#endif
}

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        v += __shfl_xor_sync(FULL_WARP, v, offset);
    }
    return v;
}

DEVICE float warp_max(float v) {
    for (int offset = 16; offset > 0; offset /= 2) {
        v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, offset));
    }
    return v;
}

// The sum over a block of up to 1024 threads, in every thread.
DEVICE float block_sum(float v) {
    SHARED(float, sums, 32);
    int warps = blockDim.x / 32;
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = v;
    }
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < warps; i++) {
        total += sums[i];
    }
    return total;
}

DEVICE float block_max(float v) {
    SHARED(float, maxima, 32);
    int warps = blockDim.x / 32;
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        maxima[threadIdx.x / 32] = v;
    }
    __syncthreads();
    float all = maxima[0];
    for (int i = 1; i < warps; i++) {
        all = fmaxf(all, maxima[i]);
    }
    return all;
}

enum { RELU = 0, SILU = 1, GELU = 2 };
enum { GATING_NONE = 0, GATING_GATE = 1, GATING_BOTH = 2 };

DEVICE float activate(int activation, float x) {
    if (activation == RELU) {
        // `fmaxf` would turn NaN into 0 and hide a fault.
        return x < 0.0f ? 0.0f : x;
    }
    if (activation == SILU) {
        return x / (1.0f + expf(-x));
    }
    float inner = 0.797884583f * x * (1.0f + 0.044715f * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

DEVICE_APART float activate_apart(int activation, float x) {
    return activate(activation, x);
}

DEVICE bool bit_is_set(const u64* bits, u32 i) {
    return bits[i / 64] >> (i % 64) & 1;
}

// Places in the array of counters.
enum {
    GATE_ROWS = 0,
    UP_ROWS = 1,
    DOWN_ROWS = 2,
    FIRED = 3,
    ACTIVE = 4,
    DISTINCT_GATE = 5,
    DISTINCT_UP = 6,
    DISTINCT_DOWN = 7
};
enum { MARK_GATE = 1, MARK_UP = 2, MARK_DOWN = 4 };

DEVICE void count(u64* counters, int place, int n) {
    if (counters && n > 0) {
        atomicAdd(&counters[place], (u64)n);
    }
}

DEVICE void mark(u32* marks, u32 row, u32 bits) {
    if (marks && bits) {
        atomicOr(&marks[row], bits);
    }
}
