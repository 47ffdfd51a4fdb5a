// The words of CUDA that the kernels use, for a host compiler. Each thread of a block is a fiber; see emulator.cpp.
#pragma once

#include <math.h>
#include <string.h>

#define __device__
#define __forceinline__ inline
#define __noinline__ inline
#define KERNEL(threads, name) extern "C" void name
// Shared memory belongs to the thread that runs the launch, whose blocks run one after the other. It is filled
// with NaN when a block first comes to it.
#define SHARED(type, name, n)              \
    static thread_local type name[n];      \
    emulator::shared(name, sizeof(name))

struct Dim3 {
    unsigned x, y, z;
};

extern thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum Meeting { SYNC = 1, SHUFFLE, BALLOT, SUMS };

// Called by every lane of a warp; hands in a value and gets those of all 32 lanes.
const unsigned long long* meet(Meeting kind, unsigned mask, unsigned long long value);
void meet_block();
// What `warp_sums` of the kernels does, to the bit, in one meeting instead of up to 16. Not done under seeds that are multiples of 16.
bool sum_at_one_meeting(float* values, int n);
void shared(void* at, unsigned long long bytes);

template <class T>
struct Letter;
template <>
struct Letter<int> {
    static const char value = 'i';
};
template <>
struct Letter<unsigned> {
    static const char value = 'u';
};
template <>
struct Letter<float> {
    static const char value = 'f';
};
template <class T>
struct Letter<T*> {
    static const char value = 'p';
};

template <class T>
T unpack(const unsigned long long* slot) {
    T value;
    memcpy(&value, slot, sizeof(T));
    return value;
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    typedef Indices<I...> Type;
};

template <auto F>
struct Call;
template <class... A, void (*F)(A...)>
struct Call<F> {
    template <int... I>
    static void apply(const unsigned long long* slots, Indices<I...>) {
        F(unpack<A>(slots + I)...);
    }
    static void run(const unsigned long long* slots) {
        apply(slots, typename Count<sizeof...(A)>::Type());
    }
    static const char* letters() {
        static const char text[] = {Letter<A>::value..., 0};
        return text;
    }
};

void add_kernel(const char* name, const char* letters, void (*run)(const unsigned long long*));

template <class T>
unsigned long long bits_of(T value) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T shuffle(unsigned mask, T value, unsigned from) {
    unsigned long long got = meet(SHUFFLE, mask, bits_of(value))[from % 32];
    return unpack<T>(&got);
}

}  // namespace emulator

#define EMULATOR_CONCAT_(a, b) a##b
#define EMULATOR_CONCAT(a, b) EMULATOR_CONCAT_(a, b)
#define EMULATOR_TEXT_(a) #a
#define EMULATOR_TEXT(a) EMULATOR_TEXT_(a)
#define EMULATED_MODULE(name) extern "C" void EMULATOR_CONCAT(emulated_module_, name)()
#define EMULATED_KERNEL(name) \
    emulator::add_kernel(EMULATOR_TEXT(name), emulator::Call<name>::letters(), emulator::Call<name>::run)

inline unsigned emulator_lane() {
    return threadIdx.x % 32;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return emulator::shuffle(mask, value, emulator_lane() ^ (unsigned)lanes);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return emulator::shuffle(mask, value, (unsigned)lane);
}

inline unsigned __ballot_sync(unsigned mask, bool yes) {
    const unsigned long long* values = emulator::meet(emulator::BALLOT, mask, yes);
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++) {
        ballot |= (unsigned)values[i] << i;
    }
    return ballot;
}

inline void __syncwarp() {
    emulator::meet(emulator::SYNC, 0xffffffffu, 0);
}

inline void __syncthreads() {
    emulator::meet_block();
}

// Fibers change over at meetings only, so plain operations are atomic.
template <class T>
T atomicAdd(T* at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}

inline unsigned atomicOr(unsigned* at, unsigned value) {
    unsigned old = *at;
    *at = old | value;
    return old;
}

inline int __popc(unsigned v) {
    return __builtin_popcount(v);
}

inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}

inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline int min(int a, int b) {
    return a < b ? a : b;
}

inline int max(int a, int b) {
    return a > b ? a : b;
}
