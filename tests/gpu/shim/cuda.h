// Runs CUDA kernels on a CPU, so that tests need no GPU: included before a program that
// g++ compiles.
//
// Each thread of a block is a fiber of its own stack. A fiber runs until it waits for
// others, at a barrier or a warp's exchange; then the next one runs, in the order of
// their numbers or backwards, a warp as far as it comes. Blocks run one after another. So a missing barrier shows
// as a wrong result in one of both orders, and a barrier that some threads miss as an
// error. Memory order, atomics' races and limits of registers are not seen.
#pragma once
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(shim::shared.data())
#define WORD_AT(word, at) (*shim::checked<word>(at))

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace shim {

struct Triple { unsigned x, y, z; };
Triple grid, block, block_at, thread_at;
const size_t STACK = 32 << 10, LIMIT = 227 << 10;

// --- switching stacks ---------------------------------------------------------------

#ifdef __x86_64__
// Pushes what a call must keep, stores the stack pointer, and goes on with the other.
extern "C" void shim_switch(void** from, void* to);
asm(R"(
.text
.globl shim_switch
.hidden shim_switch
shim_switch:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
)");
struct Context {
    void* top = nullptr;
    void start(char* stack, void (*entry)()) {
        void** words = reinterpret_cast<void**>(stack + STACK - 64);
        words[0] = reinterpret_cast<void*>(entry);  // where the first switch returns to
        words[1] = nullptr;
        top = words - 6;
    }
    void go(Context& to) { shim_switch(&top, to.top); }
};
#else
struct Context {
    ucontext_t state;
    void start(char* stack, void (*entry)()) {
        getcontext(&state);
        state.uc_stack.ss_sp = stack;
        state.uc_stack.ss_size = STACK;
        state.uc_link = nullptr;
        makecontext(&state, entry, 0);
    }
    void go(Context& to) { swapcontext(&state, &to.state); }
};
#endif

// --- threads of a block -------------------------------------------------------------

// Where threads wait for each other; `turn` counts how often all have come.
struct Meeting {
    unsigned expected = 0, arrived = 0, turn = 0;
    void check() {
        if (expected && arrived == expected) arrived = 0, ++turn;
    }
};
struct Warp {
    Meeting meeting;
    unsigned long long slots[2][32];
};
struct Fiber {
    Context context;
    std::vector<char> stack;
    bool done;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<double> shared;
Meeting barrier;
Context scheduler;
unsigned current, living, steps;
const char* error;
void (*body)(void*);
void* body_data;

inline void leave() { fibers[current].context.go(scheduler); }

inline void meet(Meeting& meeting) {
    const unsigned turn = meeting.turn;
    ++meeting.arrived;
    ++steps;
    meeting.check();
    while (meeting.turn == turn) leave();
}

template <class T> T exchange(T value, unsigned lane) {
    static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
    Warp& warp = warps[current / 32];
    const unsigned side = warp.meeting.turn & 1;
    memcpy(&warp.slots[side][current % 32], &value, sizeof(T));
    meet(warp.meeting);
    memcpy(&value, &warp.slots[side][lane], sizeof(T));
    return value;
}

inline void run_thread() {
    body(body_data);
    fibers[current].done = true;
    --living;
    ++steps;
    // Who has ended does not keep the others waiting.
    --barrier.expected;
    barrier.check();
    Meeting& meeting = warps[current / 32].meeting;
    --meeting.expected;
    meeting.check();
    leave();
}

inline void run_fiber(unsigned fiber) {
    if (fibers[fiber].done) return;
    current = fiber;
    thread_at = {current % block.x, current / block.x % block.y,
                 current / block.x / block.y};
    scheduler.go(fibers[current].context);
}

inline void run_block(bool backwards) {
    const unsigned count = block.x * block.y * block.z;
    memset(shared.data(), 0xff, shared.size() * sizeof(double));  // NaN, or −1
    warps.assign((count + 31) / 32, Warp());
    barrier = Meeting();
    barrier.expected = living = count;
    for (unsigned i = 0; i < count; ++i) {
        fibers[i].done = false;
        fibers[i].context.start(fibers[i].stack.data(), run_thread);
        ++warps[i / 32].meeting.expected;
    }
    while (living) {
        const unsigned before = steps;
        for (unsigned first = 0; first < count; first += 32) {
            unsigned now;
            do {  // as far as this warp comes without the others
                now = steps;
                for (unsigned i = first; i < count && i < first + 32; ++i)
                    run_fiber(backwards ? count - 1 - i : i);
            } while (steps != now);
        }
        if (steps == before) {
            error = "threads of a block wait at different places";
            return;
        }
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<A>*>(arguments[I])...);
}

// A place that one access may move; on a GPU an address between such places is an error.
template <class P, class T> P* checked(T* at) {
    static std::remove_const_t<P> nowhere;
    if (reinterpret_cast<size_t>(at) % sizeof(P) == 0) return reinterpret_cast<P*>(at);
    error = "an access of several items that is not aligned";
    return &nowhere;
}

// Runs all blocks; returns what went wrong, else null.
template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* sizes, size_t bytes,
                   void** arguments, bool backwards) {
    grid = {sizes[0], sizes[1], sizes[2]};
    block = {sizes[3], sizes[4], sizes[5]};
    const unsigned count = block.x * block.y * block.z;
    if (count == 0 || count > 1024) return "a block has 1 to 1024 threads";
    if (bytes > LIMIT) return "a block has at most 227 KiB of shared memory";
    if (grid.y > 65535 || grid.z > 65535) return "at most 65535 blocks in y and z";
    if (fibers.size() < count) fibers.resize(count);
    for (Fiber& fiber : fibers) fiber.stack.resize(STACK);
    shared.resize(bytes / sizeof(double) + 2);
    auto work = [=] { call(kernel, arguments, std::index_sequence_for<A...>()); };
    body = [](void* data) { (*static_cast<decltype(work)*>(data))(); };
    body_data = &work;
    error = nullptr;
    for (unsigned z = 0; z < grid.z && !error; ++z)
        for (unsigned y = 0; y < grid.y && !error; ++y)
            for (unsigned x = 0; x < grid.x && !error; ++x) {
                block_at = {x, y, z};
                run_block(backwards);
            }
    return error;
}

}  // namespace shim

#define EXPORT(name, ...)                                                             \
    extern "C" const char* name(const unsigned* sizes, size_t bytes, void** arguments, \
                                int backwards) {                                      \
        return shim::launch(__VA_ARGS__, sizes, bytes, arguments, backwards);         \
    }

// --- what kernels use ----------------------------------------------------------------

#define gridDim (shim::grid)
#define blockDim (shim::block)
#define blockIdx (shim::block_at)
#define threadIdx (shim::thread_at)

using std::min;
template <class T> void __stwb(T* at, T value) { *at = value; }

inline void __syncthreads() { shim::meet(shim::barrier); }
inline void __syncwarp(unsigned = ~0u) {
    shim::meet(shim::warps[shim::current / 32].meeting);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int lanes) {
    return shim::exchange(value, (shim::current % 32) ^ lanes);
}
template <class T> T __shfl_sync(unsigned, T value, int lane) {
    return shim::exchange(value, lane);
}
template <class T> T atomicAdd(T* at, T value) {
    const T old = *at;
    *at += value;
    return old;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
