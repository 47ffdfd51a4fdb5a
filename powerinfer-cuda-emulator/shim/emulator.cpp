// Runs kernels on the host: a block at a time, each of its threads a fiber with a stack of its own.
//
// A fiber runs until it comes to a meeting (a barrier or an exchange between the lanes of a warp) and goes on when all
// have come. Which of the fibers that can run is next, and which block, is drawn from a seeded generator: a kernel whose result
// depends on the order differs from seed to seed. In half of the blocks, also drawn, any warp may be next; in the others the
// warps have ranks, and the first that can run goes on as far as it can, which finds missing barriers that a fair draw hardly
// ever shows. Lanes that come to different meetings, and threads
// that end while others wait for them, are errors.
//
// Fibers are started with makecontext once for each thread of the host and kept; after that they change over with _setjmp and
// _longjmp, which make no system call.
#undef _FORTIFY_SOURCE
#include "emulator.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <string>
#include <vector>

thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

typedef unsigned long long u64;

struct Kernel {
    const char* letters;
    void (*run)(const u64*);
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

struct Fiber {
    jmp_buf at;
    ucontext_t context;
    char* stack = nullptr;
};

struct Warp {
    // What lanes hand in, for this meeting and the one before: no lane comes to a third before all have left the first.
    u64 values[2][32];
    unsigned turn = 0, arrived = 0;
    Meeting kind = SYNC;
    // Lanes that can run, as bits, and the place of this warp in the order of ranks.
    unsigned ready = 0, rank = 0;
};

const unsigned long STACK_BYTES = 128 * 1024;

struct Machine {
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    // Ranks of warps with lanes that can run, as bits, and which warp has a rank.
    unsigned ready_ranks = 0;
    unsigned warp_at[32];
    bool is_ranked = false;
    bool is_quick = false;
    std::vector<std::pair<char*, u64>> shared_seen;
    jmp_buf scheduler;
    unsigned current = 0, in_barrier = 0, ended = 0;
    void (*run)(const u64*) = nullptr;
    const u64* slots = nullptr;
    u64 random = 1;
    std::string error;

    unsigned draw(unsigned below) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        return (unsigned)((random >> 32) * below >> 32);
    }

    // One of the bits that are set: the next one from a drawn place on.
    unsigned draw_bit(unsigned bits) {
        unsigned place = draw(32);
        unsigned turned = bits >> place | bits << (32 - place) % 32;
        return ((unsigned)__builtin_ctz(turned) + place) % 32;
    }

    void make_ready(unsigned thread) {
        Warp& warp = warps[thread / 32];
        warp.ready |= 1u << thread % 32;
        ready_ranks |= 1u << warp.rank;
    }

    // The next thread to run, of those that can.
    unsigned pick() {
        unsigned rank = is_ranked ? (unsigned)__builtin_ctz(ready_ranks) : draw_bit(ready_ranks);
        Warp& warp = warps[warp_at[rank]];
        unsigned lane = draw_bit(warp.ready);
        warp.ready &= ~(1u << lane);
        if (warp.ready == 0) {
            ready_ranks &= ~(1u << rank);
        }
        return warp_at[rank] * 32 + lane;
    }

    ~Machine() {
        for (Fiber* f : fibers) {
            drop(f);
        }
    }

    static void drop(Fiber* f) {
        if (f->stack) {
            munmap(f->stack, STACK_BYTES);
        }
        delete f;
    }
};

// The machine of this thread, and a plain pointer to it: an object with a constructor is looked for at each use.
thread_local Machine own_machine;
thread_local Machine* machine;

// Goes on with the next fiber, or back to the scheduler if none can run.
[[noreturn]] void leave() {
    if (machine->ready_ranks == 0 || !machine->error.empty()) {
        _longjmp(machine->scheduler, 1);
    }
    unsigned next = machine->pick();
    machine->current = next;
    threadIdx.x = next;
    _longjmp(machine->fibers[next]->at, 1);
}

// Leaves the current fiber; comes back when it is its turn again.
void yield() {
    if (_setjmp(machine->fibers[machine->current]->at) == 0) {
        leave();
    }
}

// A fiber serves one thread of one block after the other.
void fiber_main() {
    for (;;) {
        machine->run(machine->slots);
        machine->ended++;
        yield();
    }
}

void fail(const char* what) {
    if (machine->error.empty()) {
        char text[400];
        snprintf(text, sizeof(text), "%s, thread %u of block (%u, %u, %u)", what, threadIdx.x, blockIdx.x, blockIdx.y,
                 blockIdx.z);
        machine->error = text;
    }
    yield();
    abort();
}

bool make_fibers(unsigned n) {
    while (machine->fibers.size() < n) {
        Fiber* f = new Fiber;
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) {
            delete f;
            return false;
        }
        f->stack = (char*)stack;
        // A page that cannot be touched ends a stack.
        mprotect(stack, (unsigned long)sysconf(_SC_PAGESIZE), PROT_NONE);
        machine->fibers.push_back(f);
        machine->current = (unsigned)machine->fibers.size() - 1;
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = f->stack;
        // Stacks that all end at the same place of a page would share a few lines of the cache.
        f->context.uc_stack.ss_size = STACK_BYTES;
        f->context.uc_link = nullptr;
        makecontext(&f->context, (void (*)())(+[] {
                        if (_setjmp(machine->fibers[machine->current]->at) == 0) {
                            _longjmp(machine->scheduler, 1);
                        }
                        fiber_main();
                    }),
                    0);
        // Its first stop is in its main function.
        if (_setjmp(machine->scheduler) == 0) {
            setcontext(&f->context);
        }
    }
    return true;
}

// Runs fibers until none can.
void run_fibers() {
    if (_setjmp(machine->scheduler) == 0) {
        leave();
    }
}

bool run_block(unsigned n_threads) {
    unsigned n_warps = n_threads / 32;
    machine->warps.assign(n_warps, Warp());
    machine->shared_seen.clear();
    machine->ready_ranks = machine->in_barrier = machine->ended = 0;
    machine->is_ranked = machine->draw(2);
    for (unsigned w = 0; w < n_warps; w++) {
        unsigned other = machine->draw(w + 1);
        machine->warp_at[w] = machine->warp_at[other];
        machine->warp_at[other] = w;
    }
    for (unsigned rank = 0; rank < n_warps; rank++) {
        machine->warps[machine->warp_at[rank]].rank = rank;
    }
    for (unsigned i = 0; i < n_threads; i++) {
        machine->make_ready(i);
    }
    run_fibers();
    if (!machine->error.empty()) {
        return false;
    }
    if (machine->ended < n_threads) {
        char text[400];
        snprintf(text, sizeof(text),
                 "divergent barrier: of %u threads in block (%u, %u, %u), %u wait at __syncthreads, %u wait for "
                 "other lanes of their warp and %u have ended",
                 n_threads, blockIdx.x, blockIdx.y, blockIdx.z, machine->in_barrier,
                 n_threads - machine->ended - machine->in_barrier, machine->ended);
        machine->error = text;
        return false;
    }
    return true;
}

}  // namespace

// `at_last` is called by the last lane to come, before any goes on.
template <class F>
inline const u64* meet_then(Meeting kind, unsigned mask, u64 value, F at_last) {
    unsigned thread = machine->current, lane = thread % 32;
    Warp& warp = machine->warps[thread / 32];
    if (mask != 0xffffffffu) {
        fail("a mask that is not the whole warp");
    }
    if (warp.arrived != 0 && warp.kind != kind) {
        fail("divergent warp: lanes are in different operations");
    }
    warp.kind = kind;
    u64* values = warp.values[warp.turn];
    values[lane] = value;
    warp.arrived |= 1u << lane;
    if (warp.arrived == 0xffffffffu) {
        at_last(values);
        warp.arrived = 0;
        warp.turn ^= 1;
        warp.ready = ~(1u << lane);
        machine->ready_ranks |= 1u << warp.rank;
    } else {
        yield();
    }
    return values;
}

const u64* meet(Meeting kind, unsigned mask, u64 value) {
    return meet_then(kind, mask, value, [](u64*) {});
}

bool sum_at_one_meeting(float* values, int n) {
    if (!machine->is_quick) {
        return false;
    }
    meet_then(SUMS, 0xffffffffu, (u64)values, [n](u64* addresses) {
        float sums[32][32];
        for (int lane = 0; lane < 32; lane++) {
            memcpy(sums[lane], (const float*)addresses[lane], n * sizeof(float));
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            for (int lane = 0; lane < offset; lane++) {
                for (int i = 0; i < n; i++) {
                    sums[lane][i] += sums[lane + offset][i];
                }
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            *(float*)addresses[lane] = sums[0][lane * n / 32];
        }
    });
    return true;
}

void meet_block() {
    unsigned thread = machine->current, n = blockDim.x;
    machine->in_barrier++;
    if (machine->in_barrier == n) {
        machine->in_barrier = 0;
        for (unsigned i = 0; i < n; i++) {
            if (i != thread) {
                machine->make_ready(i);
            }
        }
    } else {
        yield();
    }
}

void shared(void* at, u64 bytes) {
    for (auto& seen : machine->shared_seen) {
        if (seen.first == at) {
            return;
        }
    }
    machine->shared_seen.push_back({(char*)at, bytes});
    memset(at, 0xff, bytes);
}

void add_kernel(const char* name, const char* letters, void (*run)(const u64*)) {
    kernels()[name] = {letters, run};
}

}  // namespace emulator

using emulator::machine;
using emulator::own_machine;

// What the compiler's checks of the kernels call, laid out as its checkers pass it: a device faults where a host does not
// mind, at addresses that are no multiple of what is loaded.
namespace {

struct Place {
    const char* file;
    unsigned line, column;
};

[[noreturn]] void fail_at(const Place& place, const char* what, unsigned long long value) {
    const char* name = strrchr(place.file, '/');
    char text[300];
    snprintf(text, sizeof(text), "%s:%u: %s (%#llx)", name ? name + 1 : place.file, place.line, what, value);
    emulator::fail(text);
    abort();
}

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(const Place* place, unsigned long address) {
    fail_at(*place, address == 0 ? "an address of 0" : "an address that is not aligned", address);
}

extern "C" void __ubsan_handle_type_mismatch_v1_abort(const Place* place, unsigned long address) {
    __ubsan_handle_type_mismatch_v1(place, address);
}

extern "C" void __ubsan_handle_out_of_bounds(const Place* place, unsigned long index) {
    fail_at(*place, "an index past the end of an array", index);
}

extern "C" void __ubsan_handle_out_of_bounds_abort(const Place* place, unsigned long index) {
    __ubsan_handle_out_of_bounds(place, index);
}

EMULATED_MODULES

// Called once, before anything else.
extern "C" void emulator_start() {
    emulated_modules();
}

// Name and argument letters of kernel `i` in the order of names; false past the last.
extern "C" bool emulator_kernel(unsigned i, const char** name, const char** letters) {
    for (auto& kernel : emulator::kernels()) {
        if (i-- == 0) {
            *name = kernel.first.c_str();
            *letters = kernel.second.letters;
            return true;
        }
    }
    return false;
}

// Runs a kernel; `slots` has 8 bytes an argument, of the types that its letters say. Returns false with a message of at most
// `capacity` bytes.
extern "C" bool emulator_launch(const char* name, const unsigned* grid, unsigned threads, const unsigned long long* slots,
                                unsigned long long seed, char* message, unsigned long capacity) {
    auto found = emulator::kernels().find(name);
    unsigned long long n_blocks = (unsigned long long)grid[0] * grid[1] * grid[2];
    machine = &own_machine;
    machine->error.clear();
    if (found == emulator::kernels().end()) {
        machine->error = "no such kernel";
    } else if (threads == 0 || threads > 1024 || threads % 32 != 0) {
        machine->error = "a block has between 32 and 1024 threads, a multiple of 32";
    } else if (n_blocks == 0 || grid[1] > 65535 || grid[2] > 65535) {
        machine->error = "a grid has between 1 and 65535 blocks along y and z and at least 1 along x";
    } else if (!emulator::make_fibers(threads)) {
        machine->error = "no memory for the stacks of fibers";
    } else {
        machine->run = found->second.run;
        machine->slots = slots;
        machine->random = seed * 2 + 1;
        machine->is_quick = seed % 16 != 0;
        blockDim = {threads, 1, 1};
        gridDim = {grid[0], grid[1], grid[2]};
        threadIdx = {0, 0, 0};
        // Blocks in a drawn order: a walk through all of them with a step that shares no factor with their number.
        unsigned long long at = 0, step = 1;
        for (int i = 0; i < 4; i++) {
            machine->draw(2);
        }
        if (n_blocks > 1) {
            at = machine->draw((unsigned)n_blocks);
            auto divisor = [](unsigned long long a, unsigned long long b) {
                while (b) {
                    unsigned long long rest = a % b;
                    a = b;
                    b = rest;
                }
                return a;
            };
            do {
                step = 1 + machine->draw((unsigned)n_blocks);
            } while (divisor(step, n_blocks) != 1);
        }
        for (unsigned long long i = 0; i < n_blocks; i++) {
            blockIdx = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]),
                        (unsigned)(at / grid[0] / grid[1])};
            if (!emulator::run_block(threads)) {
                // Fibers that stand in the middle of a kernel are of no more use.
                for (auto* fiber : machine->fibers) {
                    emulator::Machine::drop(fiber);
                }
                machine->fibers.clear();
                break;
            }
            at = (at + step) % n_blocks;
        }
    }
    if (machine->error.empty()) {
        return true;
    }
    snprintf(message, capacity, "%s", machine->error.c_str());
    return false;
}
