// A library with the functions of NVIDIA's driver that powerinfer-cuda calls, on the emulator: the file of that crate that
// calls the driver can be tested where there is none. Signatures and numbers are those of the driver's interface.
//
// It does what a device may do and a caller must reckon with: work that is queued runs only when somebody waits for it,
// memory is filled with NaN, and addresses that were not handed out are errors. Whoever gives the context back while
// something is left that was made in it ends the program.
//
// FAKE_CUDA_VERSION, FAKE_CUDA_DEVICES and FAKE_CUDA_BROKEN (the number of a device that does not open) say what it plays.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

extern "C" void emulator_start();
extern "C" bool emulator_kernel(unsigned i, const char** name, const char** letters);
extern "C" bool emulator_launch(const char* name, const unsigned* grid, unsigned threads, const unsigned long long* slots,
                                unsigned long long seed, char* message, unsigned long capacity);

typedef int Result;
typedef unsigned long long Address;

namespace {

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    UNCORRECTABLE = 214,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
};

const unsigned long MEMORY_BYTES = 1ul << 30;

typedef std::function<Result()> Work;

struct Stream {
    std::vector<Work> queue;
    bool is_capturing = false;
    std::vector<Work> captured;
};

struct Graph {
    std::vector<Work> work;
};

struct Event {
    Stream* stream = nullptr;
};

struct Function {
    std::string name;
    const char* letters;
};

struct Module {
    std::string text;
    std::vector<Function*> functions;
};

struct Context {
    std::map<Address, unsigned long> memory;
    std::map<char*, unsigned long> pinned;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<Graph*> graphs;
    std::set<Module*> modules;
    unsigned long used = 0;
    int n_users = 0;
    unsigned long long seed = 1;
};

std::recursive_mutex mutex;
std::map<int, Context> contexts;
thread_local Context* current;
bool is_started = false;

#define ENTER() std::lock_guard<std::recursive_mutex> guard(mutex)
#define ENTER_CONTEXT()        \
    ENTER();                   \
    if (!current) {            \
        return INVALID_CONTEXT; \
    }

int number(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

Result run(Stream* stream) {
    if (stream->is_capturing) {
        return CAPTURE_UNSUPPORTED;
    }
    std::vector<Work> queue;
    queue.swap(stream->queue);
    for (Work& work : queue) {
        if (Result result = work()) {
            return result;
        }
    }
    return SUCCESS;
}

Result run_all() {
    for (Stream* stream : current->streams) {
        if (Result result = run(stream)) {
            return result;
        }
    }
    return SUCCESS;
}

// Copies and launches; copies are not kept in graphs here.
Result enqueue(Stream* stream, bool is_launch, Work work) {
    if (!current->streams.count(stream)) {
        return INVALID_HANDLE;
    }
    if (stream->is_capturing) {
        if (!is_launch) {
            return CAPTURE_UNSUPPORTED;
        }
        stream->captured.push_back(work);
    } else {
        stream->queue.push_back(work);
    }
    return SUCCESS;
}

// So many bytes lie in one piece of memory.
template <class K>
bool holds(const std::map<K, unsigned long>& pieces, K at, unsigned long n) {
    auto after = pieces.upper_bound(at);
    if (after == pieces.begin()) {
        return false;
    }
    auto piece = std::prev(after);
    unsigned long offset = (unsigned long)at - (unsigned long)piece->first;
    return offset <= piece->second && n <= piece->second - offset;
}

// The host's side of a copy is pinned memory or, for those that are waited for at once, any other.
Result copy(void* to, const void* from, unsigned long n, Stream* stream) {
    return enqueue(stream, false, [=] {
        memcpy(to, from, n);
        return (Result)SUCCESS;
    });
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Result

API cuGetErrorName(Result, const char** text) {
    *text = "an error of the emulated driver";
    return SUCCESS;
}

API cuGetErrorString(Result error, const char** text) {
    return cuGetErrorName(error, text);
}

API cuInit(unsigned) {
    ENTER();
    if (!is_started) {
        emulator_start();
        is_started = true;
    }
    return SUCCESS;
}

API cuDriverGetVersion(int* version) {
    *version = number("FAKE_CUDA_VERSION", 12000);
    return SUCCESS;
}

API cuDeviceGetCount(int* n) {
    *n = number("FAKE_CUDA_DEVICES", 1);
    return is_started ? SUCCESS : NOT_INITIALIZED;
}

API cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < number("FAKE_CUDA_DEVICES", 1) ? SUCCESS : INVALID_DEVICE;
}

API cuDeviceGetName(char* name, int capacity, int device) {
    snprintf(name, (unsigned long)capacity, "Emulated device %d", device);
    return SUCCESS;
}

// 75 and 76 are the major and the minor number of the compute capability.
API cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 8 : 9;
    return attribute == 75 || attribute == 76 ? SUCCESS : INVALID_VALUE;
}

API cuDevicePrimaryCtxRetain(Context** context, int device) {
    ENTER();
    if (device == number("FAKE_CUDA_BROKEN", -1)) {
        return UNCORRECTABLE;
    }
    *context = &contexts[device];
    (*context)->n_users++;
    return SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER();
    Context& c = contexts[device];
    if (--c.n_users == 0 && (c.memory.size() || c.pinned.size() || c.streams.size() || c.events.size() ||
                             c.graphs.size() || c.modules.size())) {
        fprintf(stderr, "left in the context: %zu pieces of memory, %zu pinned, %zu streams, %zu events, %zu graphs, %zu modules\n",
                c.memory.size(), c.pinned.size(), c.streams.size(), c.events.size(), c.graphs.size(), c.modules.size());
        abort();
    }
    return c.n_users < 0 ? INVALID_CONTEXT : SUCCESS;
}

API cuCtxSetCurrent(Context* context) {
    current = context;
    return SUCCESS;
}

API cuMemGetInfo_v2(unsigned long* free, unsigned long* total) {
    ENTER_CONTEXT();
    *free = MEMORY_BYTES - current->used;
    *total = MEMORY_BYTES;
    return SUCCESS;
}

API cuMemAlloc_v2(Address* at, unsigned long n) {
    ENTER_CONTEXT();
    if (n == 0) {
        return INVALID_VALUE;
    }
    if (n > MEMORY_BYTES - current->used) {
        return OUT_OF_MEMORY;
    }
    void* memory = aligned_alloc(256, (n + 255) / 256 * 256);
    if (!memory) {
        return OUT_OF_MEMORY;
    }
    memset(memory, 0xff, n);
    *at = (Address)memory;
    current->memory[*at] = n;
    current->used += n;
    return SUCCESS;
}

API cuMemFree_v2(Address at) {
    ENTER_CONTEXT();
    auto piece = current->memory.find(at);
    if (piece == current->memory.end()) {
        return INVALID_VALUE;
    }
    if (Result result = run_all()) {
        return result;
    }
    current->used -= piece->second;
    current->memory.erase(piece);
    free((void*)at);
    return SUCCESS;
}

API cuMemHostAlloc(void** at, unsigned long n, unsigned) {
    ENTER_CONTEXT();
    *at = malloc(n);
    current->pinned[(char*)*at] = n;
    return *at ? SUCCESS : OUT_OF_MEMORY;
}

API cuMemFreeHost(void* at) {
    ENTER_CONTEXT();
    if (!current->pinned.erase((char*)at)) {
        return INVALID_VALUE;
    }
    free(at);
    return SUCCESS;
}

API cuMemcpyHtoDAsync_v2(Address to, const void* from, unsigned long n, Stream* stream) {
    ENTER_CONTEXT();
    if (!holds(current->memory, to, n)) {
        return ILLEGAL_ADDRESS;
    }
    return copy((void*)to, from, n, stream);
}

API cuMemcpyDtoHAsync_v2(void* to, Address from, unsigned long n, Stream* stream) {
    ENTER_CONTEXT();
    if (!holds(current->memory, from, n) || !holds(current->pinned, (char*)to, n)) {
        return ILLEGAL_ADDRESS;
    }
    return copy(to, (const void*)from, n, stream);
}

API cuMemcpyDtoDAsync_v2(Address to, Address from, unsigned long n, Stream* stream) {
    ENTER_CONTEXT();
    if (!holds(current->memory, from, n) || !holds(current->memory, to, n)) {
        return ILLEGAL_ADDRESS;
    }
    return copy((void*)to, (const void*)from, n, stream);
}

API cuModuleLoadData(Module** module, const void* image) {
    ENTER_CONTEXT();
    Module* made = new Module{(const char*)image, {}};
    if (made->text.find(".version 8.0") == std::string::npos || made->text.find(".target sm_80") == std::string::npos) {
        delete made;
        return INVALID_PTX;
    }
    current->modules.insert(made);
    *module = made;
    return SUCCESS;
}

API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    ENTER_CONTEXT();
    size_t entry = module->text.find(std::string(".entry ") + name + "(");
    const char *known, *letters;
    for (unsigned i = 0; entry != std::string::npos && emulator_kernel(i, &known, &letters); i++) {
        if (strcmp(known, name) == 0) {
            // The device's form of the kernel has as many arguments as the host's.
            std::string params = module->text.substr(entry, module->text.find(')', entry) - entry);
            size_t n = 0;
            for (size_t at = 0; (at = params.find(".param", at)) != std::string::npos; at++) {
                n++;
            }
            if (n != strlen(letters)) {
                return INVALID_PTX;
            }
            *function = new Function{name, letters};
            module->functions.push_back(*function);
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

API cuModuleUnload(Module* module) {
    ENTER_CONTEXT();
    if (!current->modules.erase(module)) {
        return INVALID_HANDLE;
    }
    for (Function* function : module->functions) {
        delete function;
    }
    delete module;
    return SUCCESS;
}

API cuStreamCreate(Stream** stream, unsigned) {
    ENTER_CONTEXT();
    *stream = new Stream;
    current->streams.insert(*stream);
    return SUCCESS;
}

API cuStreamDestroy_v2(Stream* stream) {
    ENTER_CONTEXT();
    if (!current->streams.erase(stream)) {
        return INVALID_HANDLE;
    }
    delete stream;
    return SUCCESS;
}

API cuStreamSynchronize(Stream* stream) {
    ENTER_CONTEXT();
    return current->streams.count(stream) ? run(stream) : INVALID_HANDLE;
}

API cuStreamBeginCapture_v2(Stream* stream, int) {
    ENTER_CONTEXT();
    if (!current->streams.count(stream) || stream->is_capturing) {
        return INVALID_HANDLE;
    }
    stream->is_capturing = true;
    stream->captured.clear();
    return SUCCESS;
}

API cuStreamEndCapture(Stream* stream, Graph** graph) {
    ENTER_CONTEXT();
    if (!current->streams.count(stream) || !stream->is_capturing) {
        return INVALID_HANDLE;
    }
    stream->is_capturing = false;
    *graph = new Graph{stream->captured};
    current->graphs.insert(*graph);
    return SUCCESS;
}

API cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    ENTER_CONTEXT();
    if (!current->graphs.count(graph)) {
        return INVALID_HANDLE;
    }
    *exec = new Graph(*graph);
    current->graphs.insert(*exec);
    return SUCCESS;
}

API cuGraphLaunch(Graph* exec, Stream* stream) {
    ENTER_CONTEXT();
    if (!current->graphs.count(exec)) {
        return INVALID_HANDLE;
    }
    for (Work& work : exec->work) {
        if (Result result = enqueue(stream, true, work)) {
            return result;
        }
    }
    return SUCCESS;
}

API cuGraphDestroy(Graph* graph) {
    ENTER_CONTEXT();
    if (!current->graphs.erase(graph)) {
        return INVALID_HANDLE;
    }
    delete graph;
    return SUCCESS;
}

API cuGraphExecDestroy(Graph* exec) {
    return cuGraphDestroy(exec);
}

API cuEventCreate(Event** event, unsigned) {
    ENTER_CONTEXT();
    *event = new Event;
    current->events.insert(*event);
    return SUCCESS;
}

API cuEventDestroy_v2(Event* event) {
    ENTER_CONTEXT();
    if (!current->events.erase(event)) {
        return INVALID_HANDLE;
    }
    delete event;
    return SUCCESS;
}

API cuEventRecord(Event* event, Stream* stream) {
    ENTER_CONTEXT();
    if (!current->events.count(event) || !current->streams.count(stream) || stream->is_capturing) {
        return INVALID_HANDLE;
    }
    event->stream = stream;
    return SUCCESS;
}

API cuEventSynchronize(Event* event) {
    ENTER_CONTEXT();
    if (!current->events.count(event)) {
        return INVALID_HANDLE;
    }
    return event->stream ? run(event->stream) : SUCCESS;
}

API cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, Stream* stream, void** params, void** extra) {
    ENTER_CONTEXT();
    if (block_y != 1 || block_z != 1 || shared_bytes != 0 || extra) {
        return INVALID_VALUE;
    }
    std::vector<unsigned long long> slots;
    for (const char* letter = function->letters; *letter; letter++) {
        unsigned long long slot = 0;
        memcpy(&slot, params[slots.size()], *letter == 'p' ? 8 : 4);
        slots.push_back(slot);
    }
    std::string name = function->name;
    Context* context = current;
    return enqueue(stream, true, [=] {
        unsigned grid[3] = {x, y, z};
        char message[512];
        context->seed = context->seed * 6364136223846793005ull + 1;
        if (!emulator_launch(name.c_str(), grid, block_x, slots.data(), context->seed, message, sizeof(message))) {
            fprintf(stderr, "%s: %s\n", name.c_str(), message);
            return (Result)LAUNCH_FAILED;
        }
        return (Result)SUCCESS;
    });
}
