// Kernels that break rules, and some that keep them: the emulator's own tests.
#include "common.cuh"

KERNEL(1024, selftest_block_divergence)(u32* out, int n) {
    if ((int)threadIdx.x < n) {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

KERNEL(1024, selftest_warp_divergence)(u32* out, int n) {
    u32 v = threadIdx.x;
    if ((int)threadIdx.x < n) {
        v = __shfl_xor_sync(FULL_WARP, v, 1);
    } else {
        v = __ballot_sync(FULL_WARP, v & 1);
    }
    out[threadIdx.x] = v;
}

KERNEL(1024, selftest_mask)(u32* out, int n) {
    out[threadIdx.x] = __shfl_sync((u32)n, threadIdx.x, 0);
}

// A load of 4 bytes at a multiple of 2, which a device refuses.
KERNEL(1024, selftest_misaligned)(u8* out, int n) {
    *(u32*)(out + n) += 1;
}

KERNEL(1024, selftest_bounds)(u32* out, int n) {
    SHARED(u32, values, 32);
    values[threadIdx.x + n] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

// A race: who comes last depends on the order.
KERNEL(1024, selftest_race)(u32* out, int n) {
    out[0] = threadIdx.x + blockIdx.x * blockDim.x + n;
}

// Shared memory that nobody has written is NaN, in the second block as in the first.
KERNEL(1024, selftest_stale)(float* out, int n) {
    SHARED(float, values, 32);
    out[blockIdx.x * 32 + threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = 1.0f;
}

// A barrier is missing between reading the sum of the first round and writing that of the second.
KERNEL(1024, selftest_missing_barrier)(u32* out, int n) {
    SHARED(u32, sums, 32);
    u32 total = 0;
    for (int round = 1; round <= 2; round++) {
        u32 ballot = __ballot_sync(FULL_WARP, true);
        if (threadIdx.x % 32 == 0) {
            sums[threadIdx.x / 32] = __popc(ballot) * round;
        }
        __syncthreads();
        for (int w = 0; w < (int)blockDim.x / 32; w++) {
            total += sums[w];
        }
    }
    out[threadIdx.x] = total;
}

// What the words mean.
KERNEL(1024, selftest_words)(int* out, int n) {
    SHARED(int, sum, 1);
    int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        sum[0] = 0;
    }
    __syncthreads();
    atomicAdd(&sum[0], (int)threadIdx.x);
    __syncthreads();
    int total = sum[0];
    u32 odd = __ballot_sync(FULL_WARP, lane & 1);
    int neighbour = __shfl_xor_sync(FULL_WARP, (int)threadIdx.x, 3);
    int third = __shfl_sync(FULL_WARP, (int)threadIdx.x, 3);
    int dot = dot4(0x01ff7f80, 0x02030405, 7);
    float whole = warp_sum((float)lane), top = warp_max((float)-lane);
    int* to = out + 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    to[0] = total;
    to[1] = odd == 0xaaaaaaaau && __popc(odd) == 16;
    to[2] = neighbour;
    to[3] = third;
    to[4] = dot;
    to[5] = (int)whole;
    to[6] = (int)top;
    to[7] = (int)(gridDim.x * 10000 + blockDim.x);
}

EMULATED_MODULE(selftest) {
    EMULATED_KERNEL(selftest_block_divergence);
    EMULATED_KERNEL(selftest_warp_divergence);
    EMULATED_KERNEL(selftest_mask);
    EMULATED_KERNEL(selftest_misaligned);
    EMULATED_KERNEL(selftest_bounds);
    EMULATED_KERNEL(selftest_race);
    EMULATED_KERNEL(selftest_missing_barrier);
    EMULATED_KERNEL(selftest_stale);
    EMULATED_KERNEL(selftest_words);
}
