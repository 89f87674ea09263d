/* The data path of the shm backend in C: one call of `run` does what `DirectCalls._run` does in Python for data that
   fits into one chunk: write, publish, wait, compare the ranks' calls, read. It is optional; the layout of the shared
   memory is that of shared_memory.py, both follow the same protocol, and ranks may use either.

   It gets addresses and sizes and nothing of torch, and uses Python's stable ABI (3.11): one binary for all versions.

   Memory order. Every word below is written by one rank and read by the others.
   - `epoch` of a line: stored with release after everything that the rank wrote for this epoch (its hash, its payload
     or chunk, its row of counts); loaded with acquire. So who sees the epoch sees the data.
   - A rank publishes an epoch only after it has seen the one before of every rank; a call that is interrupted before that
     aborts the group.
   - Reuse: a rank writes the line, chunk and counts of epoch e + 2 only after it has seen epoch e + 1 of every rank, and
     a rank publishes e + 1 after it has read all data of e. The release of e + 1 keeps those reads before it, and the
     acquire of it keeps the later writes after it.
   - Sleeping: the kernel compares the word with the value seen before it puts a rank to sleep, and a publisher always
     wakes after its store, so that no wake-up is lost. */

#if !defined(__linux__) || !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the data path needs Linux on a little-endian processor"
#endif

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;

#ifndef ANYWHERE
#define ANYWHERE() /* the stress test waits here, for a random time */
#endif

enum { LAYOUT = 1 }; /* of the memory and of the arguments; as in data_path.py */
enum { LINE = 64, RANK_LINES = 2 * LINE, INLINE = 48 };
enum { ALL_GATHER, ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, EXCHANGE_EVEN, EXCHANGE, RELAY, BARRIER, OPS };
enum { DONE, FLAGS_DIFFER, LATE, DIFFERENT, REST };

/* What a rank publishes in an epoch. Each rank has two of them, for odd and even epochs. */
typedef struct {
    u64 epoch;
    u64 hash;
    char payload[INLINE]; /* data of at most 48 bytes, instead of the chunk */
} Line;

typedef struct {
    char *lines;       /* [rank][buffer] */
    u64 *counts[2];    /* [buffer][rank][2 * size] */
    char *chunks;      /* [rank][buffer][chunk] */
    u64 rank, size, chunk;
} Group;

typedef struct {
    int op;
    int kind;          /* of the elements, for sums; see SUMS */
    u64 itemsize;
    char *out;
    const char *given;
    u64 count;         /* elements of one rank's part */
    int64_t extra;     /* root, or source (-1: none) */
    const u64 *sizes;  /* of an uneven exchange: what goes to each rank, then what comes from each; of a relay: those of
                          `given` and `out` */
} Move;

typedef struct {
    u64 hash;
    u64 flags;          /* the bits of the hash that may differ */
    u64 epoch;
    u64 pauses, yields; /* how often to look before the caller is asked to wait */
    u64 nanoseconds;    /* how long to sleep after that */
} Meeting;

static Line *line_of(const Group *group, u64 rank, u64 epoch) {
    return (Line *)(group->lines + rank * RANK_LINES + (epoch & 1) * LINE);
}

/* -- sums, in the order of the rows, through a block, so that `out` may be one of them */

enum { BLOCK = 512 };
typedef void (*Sum)(char *out, const char *const *rows, u64 number, u64 count);

static inline float of_half(uint16_t bits) {
    union { uint32_t i; float f; } value;
    uint32_t magnitude = bits & 0x7fff;
    /* Not by multiplication of a denormal number, which is zero after torch.set_flush_denormal(True). */
    if (magnitude < 0x400) value.f = (float)(int32_t)magnitude * 0x1p-24f;
    else value.i = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000 : 0x38000000);
    value.i |= (uint32_t)(bits & 0x8000) << 16;
    return value.f;
}

static inline uint16_t to_half(float given) {
    union { float f; uint32_t i; } value = {.f = given}, magic = {.i = 0x3f000000}; /* 0.5 */
    uint32_t sign = value.i >> 16 & 0x8000;
    value.i &= 0x7fffffff;
    if (value.i > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (value.i >> 13 & 0x3ff));
    if (value.i >= 0x47800000) return (uint16_t)(sign | 0x7c00); /* 65536 and more */
    if (value.i < 0x38800000) { /* below 2^-14: the addition rounds to multiples of 2^-24 */
        value.f += magic.f;
        return (uint16_t)(sign | (value.i - magic.i));
    }
    value.i += 0xc8000fff + (value.i >> 13 & 1); /* another exponent; to nearest, ties to even */
    return (uint16_t)(sign | value.i >> 13);
}

static inline float of_bfloat(uint16_t bits) {
    union { uint32_t i; float f; } value = {.i = (uint32_t)bits << 16};
    return value.f;
}

static inline uint16_t to_bfloat(float given) {
    union { float f; uint32_t i; } value = {.f = given};
    uint32_t rounded = (value.i + 0x7fff + (value.i >> 16 & 1)) >> 16;
    return (uint16_t)((value.i & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#define PLUS(a, b) ((a) + (b))
#define OR(a, b) ((a) | (b))
#define HALVES(a, b) to_half(of_half(a) + of_half(b))
#define BFLOATS(a, b) to_bfloat(of_bfloat(a) + of_bfloat(b))

/* Memory of other types is read as it comes. */
#define ANY __attribute__((may_alias))

#define DEFINE_SUM(name, type, add, target)                                                                            \
    target static void name(char *out, const char *const *rows, u64 number, u64 count) {                               \
        typedef type ANY Item;                                                                                         \
        Item block[BLOCK];                                                                                             \
        for (u64 start = 0; start < count; start += BLOCK) {                                                           \
            u64 some = count - start < BLOCK ? count - start : BLOCK;                                                  \
            const Item *first = (const Item *)rows[0] + start, *second = (const Item *)rows[1] + start;                \
            for (u64 i = 0; i < some; i++) block[i] = (Item)add(first[i], second[i]);                                  \
            for (u64 row = 2; row < number; row++) {                                                                   \
                const Item *next = (const Item *)rows[row] + start;                                                    \
                for (u64 i = 0; i < some; i++) block[i] = (Item)add(block[i], next[i]);                                \
            }                                                                                                          \
            memcpy((Item *)out + start, block, some * sizeof(Item));                                                   \
        }                                                                                                              \
    }

#define DEFINE_SUMS(suffix, target)                                                                                    \
    DEFINE_SUM(sum_f32_##suffix, float, PLUS, target)                                                                  \
    DEFINE_SUM(sum_f64_##suffix, double, PLUS, target)                                                                 \
    DEFINE_SUM(sum_u8_##suffix, uint8_t, PLUS, target)                                                                 \
    DEFINE_SUM(sum_u16_##suffix, uint16_t, PLUS, target)                                                               \
    DEFINE_SUM(sum_u32_##suffix, uint32_t, PLUS, target)                                                               \
    DEFINE_SUM(sum_u64_##suffix, uint64_t, PLUS, target)                                                               \
    DEFINE_SUM(sum_bool_##suffix, uint8_t, OR, target)                                                                 \
    DEFINE_SUM(sum_f16_##suffix, uint16_t, HALVES, target)                                                             \
    DEFINE_SUM(sum_bf16_##suffix, uint16_t, BFLOATS, target)

#define SUMS(suffix)                                                                                                   \
    {NULL, sum_f32_##suffix, sum_f64_##suffix, sum_u8_##suffix, sum_u16_##suffix, sum_u32_##suffix,                    \
     sum_u64_##suffix, sum_bool_##suffix, sum_f16_##suffix, sum_bf16_##suffix}

enum { KINDS = 10 };

DEFINE_SUMS(plain, )
static const Sum sums_plain[KINDS] = SUMS(plain);
#if defined(__x86_64__)
DEFINE_SUMS(avx2, __attribute__((target("avx2"))))
static const Sum sums_avx2[KINDS] = SUMS(avx2);
#endif

static Sum sum_of(int kind) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return sums_avx2[kind];
#endif
    return sums_plain[kind];
}

static void sum(const Move *move, const char *const *rows, u64 number) {
    if (number == 1) memmove(move->out, rows[0], move->count * move->itemsize);
    else sum_of(move->kind)(move->out, rows, number, move->count);
}

/* -- where the data of a rank is in an epoch */

static char *chunk_of(const Group *group, u64 rank, u64 epoch) {
    return group->chunks + (2 * rank + (epoch & 1)) * group->chunk;
}

/* Small data is beside the flag, where its size is the same on every rank. */
static char *slot_of(const Group *group, u64 rank, u64 epoch, u64 bytes) {
    return bytes <= INLINE ? line_of(group, rank, epoch)->payload : chunk_of(group, rank, epoch);
}

static void copy(char *to, const char *from, u64 bytes) {
    ANYWHERE();
    if (bytes) memcpy(to, from, bytes);
}

/* The pieces for the others, beginning with the next rank. */
static u64 place(const Group *group, u64 source, u64 target) {
    return (target + group->size - source - 1) % group->size;
}

static void write_pieces(const Group *group, const Move *move, char *to) {
    u64 bytes = move->count * move->itemsize;
    for (u64 step = 0; step + 1 < group->size; step++)
        copy(to + step * bytes, move->given + (group->rank + 1 + step) % group->size * bytes, bytes);
}

static u64 total(const u64 *sizes, u64 number) {
    u64 found = 0;
    for (u64 i = 0; i < number; i++) found += sizes[i];
    return found;
}

static void write_data(const Group *group, const Move *move, u64 epoch) {
    u64 rank = group->rank, size = group->size, item = move->itemsize, bytes = move->count * item;
    u64 *row = group->counts[epoch & 1] + 2 * size * rank;
    switch (move->op) {
    case BROADCAST:
        if ((u64)move->extra != rank) return;
        /* fall through */
    case ALL_GATHER:
    case ALL_REDUCE:
    case REDUCE:
        copy(slot_of(group, rank, epoch, bytes), move->given, bytes);
        return;
    case REDUCE_SCATTER:
        write_pieces(group, move, slot_of(group, rank, epoch, (size - 1) * bytes));
        return;
    case EXCHANGE_EVEN:
        for (u64 i = 0; i < 2 * size; i++) row[i] = move->count;
        write_pieces(group, move, chunk_of(group, rank, epoch));
        return;
    case EXCHANGE: {
        u64 before = total(move->sizes, rank), behind = total(move->sizes + rank + 1, size - rank - 1);
        char *to = chunk_of(group, rank, epoch);
        memcpy(row, move->sizes, 2 * size * sizeof(u64));
        copy(to, move->given + (before + move->sizes[rank]) * item, behind * item);
        copy(to + behind * item, move->given, before * item);
        return;
    }
    case RELAY:
        row[0] = move->sizes[0];
        row[1] = move->extra < 0 ? size : (u64)move->extra;
        row[2] = move->sizes[1];
        copy(chunk_of(group, rank, epoch), move->given, move->sizes[0] * item);
        return;
    }
}

/* Returns whether all sizes fit together, and the data was in one chunk. */
static int read_exchange(const Group *group, const Move *move, u64 epoch) {
    u64 rank = group->rank, size = group->size, item = move->itemsize, at = 0;
    const u64 *counts = group->counts[epoch & 1];
    for (u64 source = 0; source < size; source++) {
        const u64 *sends = counts + 2 * size * source;
        for (u64 target = 0; target < size; target++)
            if (sends[target] != counts[2 * size * target + size + source]) return 0;
        if ((total(sends, size) - sends[source]) * item > group->chunk) return 0;
    }
    for (u64 source = 0; source < size; source++) {
        const u64 *sends = counts + 2 * size * source;
        const char *from = chunk_of(group, source, epoch);
        if (source == rank) from = move->given + total(sends, rank) * item;
        else for (u64 step = 0; step < place(group, source, rank); step++)
            from += sends[(source + 1 + step) % size] * item;
        copy(move->out + at, from, sends[rank] * item);
        at += sends[rank] * item;
    }
    return 1;
}

static int read_relay(const Group *group, const Move *move, u64 epoch) {
    u64 size = group->size, item = move->itemsize;
    const u64 *counts = group->counts[epoch & 1];
    for (u64 rank = 0; rank < size; rank++) {
        const u64 *row = counts + 2 * size * rank;
        if (row[2] != (row[1] < size ? counts[2 * size * row[1]] : 0) || row[0] * item > group->chunk) return 0;
    }
    if (move->extra >= 0) copy(move->out, chunk_of(group, (u64)move->extra, epoch), move->sizes[1] * item);
    return 1;
}

/* Returns whether the call is over; else the caller goes on in Python. */
static int read_data(const Group *group, const Move *move, u64 epoch) {
    u64 rank = group->rank, size = group->size, bytes = move->count * move->itemsize;
    const char *rows[size];
    switch (move->op) {
    case ALL_GATHER:
        for (u64 source = 0; source < size; source++)
            copy(move->out + source * bytes, slot_of(group, source, epoch, bytes), bytes);
        return 1;
    case REDUCE:
        if ((u64)move->extra != rank) return 1;
        /* fall through */
    case ALL_REDUCE:
        for (u64 source = 0; source < size; source++) rows[source] = slot_of(group, source, epoch, bytes);
        sum(move, rows, size);
        return 1;
    case BROADCAST:
        if ((u64)move->extra != rank) copy(move->out, slot_of(group, (u64)move->extra, epoch, bytes), bytes);
        else if (bytes && move->out != move->given) memmove(move->out, move->given, bytes);
        return 1;
    case EXCHANGE_EVEN: {
        const u64 *counts = group->counts[epoch & 1];
        for (u64 i = 0; i < 2 * size * size; i++)
            if (counts[i] != move->count) return 0;
    }
        /* fall through */
    case REDUCE_SCATTER:
        for (u64 source = 0; source < size; source++) {
            const char *from = move->op == EXCHANGE_EVEN ? chunk_of(group, source, epoch)
                                                         : slot_of(group, source, epoch, (size - 1) * bytes);
            rows[source] = source == rank ? move->given + rank * bytes : from + place(group, source, rank) * bytes;
        }
        if (move->op == REDUCE_SCATTER) sum(move, rows, size);
        else for (u64 source = 0; source < size; source++) copy(move->out + source * bytes, rows[source], bytes);
        return 1;
    case EXCHANGE:
        return read_exchange(group, move, epoch);
    case RELAY:
        return read_relay(group, move, epoch);
    }
    return 1;
}

/* -- waiting */

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The first rank that has not published this epoch, or the number of ranks. */
static u64 late(const Group *group, u64 epoch) {
    u64 rank = 0;
    while (rank < group->size && __atomic_load_n(&line_of(group, rank, epoch)->epoch, __ATOMIC_ACQUIRE) >= epoch) rank++;
    return rank;
}

static int seen_soon(const Group *group, const Meeting *meeting) {
    for (u64 i = 0; i <= meeting->pauses; i++) {
        if (late(group, meeting->epoch) == group->size) return 1;
        pause_briefly();
    }
    return 0;
}

static u64 now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (u64)time.tv_sec * 1000000000u + (u64)time.tv_nsec;
}

/* Look and yield, then sleep. Returns whether all ranks have arrived; any signal ends it. */
static int seen_later(const Group *group, const Meeting *meeting) {
    for (u64 i = 0; i < meeting->yields; i++) {
        if (late(group, meeting->epoch) == group->size) return 1;
        sched_yield();
    }
    u64 end = now() + meeting->nanoseconds;
    for (;;) {
        u64 rank = late(group, meeting->epoch);
        if (rank == group->size) return 1;
        u64 time = now();
        if (time >= end) return 0;
        u64 *word = &line_of(group, rank, meeting->epoch)->epoch, seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (seen >= meeting->epoch) continue;
        struct timespec most = {(time_t)((end - time) / 1000000000u), (long)((end - time) % 1000000000u)};
        /* 0: woken; EAGAIN: published meanwhile; else out of time or a signal. */
        if (syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &most, NULL, 0) != 0 &&
            late(group, meeting->epoch) == rank)
            return 0;
    }
}

static void publish(const Group *group, const Meeting *meeting) {
    Line *line = line_of(group, group->rank, meeting->epoch);
    ANYWHERE();
    line->hash = meeting->hash;
    ANYWHERE();
    __atomic_store_n(&line->epoch, meeting->epoch, __ATOMIC_RELEASE);
    syscall(SYS_futex, &line->epoch, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* What comes after the ranks have met. */
static int finish(const Group *group, const Move *move, const Meeting *meeting) {
    u64 different = 0;
    ANYWHERE();
    for (u64 rank = 0; rank < group->size; rank++)
        different |= line_of(group, rank, meeting->epoch)->hash ^ meeting->hash;
    if (different & ~meeting->flags) return DIFFERENT;
    ANYWHERE();
    if (!read_data(group, move, meeting->epoch)) return REST;
    return different ? FLAGS_DIFFER : DONE;
}

#ifndef GRADMESH_WITHOUT_PYTHON

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static const char CAPSULE[] = "gradmesh.shm";
enum { LARGE = 1 << 14 };

static void forget(PyObject *capsule) {
    PyMem_Free(PyCapsule_GetPointer(capsule, CAPSULE));
}

static u64 number(PyObject *object) {
    return (u64)PyLong_AsUnsignedLongLongMask(object);
}

static PyObject *attach(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 7) return PyErr_Format(PyExc_TypeError, "attach takes 7 numbers");
    Group *group = PyMem_Malloc(sizeof *group);
    if (!group) return PyErr_NoMemory();
    group->lines = (char *)(uintptr_t)number(args[0]);
    group->counts[0] = (u64 *)(uintptr_t)number(args[1]);
    group->counts[1] = (u64 *)(uintptr_t)number(args[2]);
    group->chunks = (char *)(uintptr_t)number(args[3]);
    group->rank = number(args[4]);
    group->size = number(args[5]);
    group->chunk = number(args[6]);
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(group, CAPSULE, forget);
    if (!capsule) PyMem_Free(group);
    return capsule;
}

static PyObject *run(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 15) return PyErr_Format(PyExc_TypeError, "run takes 15 arguments");
    const Group *group = PyCapsule_GetPointer(args[0], CAPSULE);
    if (!group) return NULL;
    Move move = {
        .op = (int)number(args[1]),
        .kind = (int)number(args[2]),
        .itemsize = number(args[3]),
        .out = (char *)(uintptr_t)number(args[4]),
        .given = (const char *)(uintptr_t)number(args[5]),
        .count = number(args[6]),
        .extra = (int64_t)number(args[7]),
        .sizes = (const u64 *)(uintptr_t)number(args[8]),
    };
    Meeting meeting = {
        .hash = number(args[9]),
        .flags = number(args[10]),
        .epoch = number(args[11]),
        .pauses = number(args[12]),
        .yields = number(args[13]),
        .nanoseconds = number(args[14]),
    };
    if (PyErr_Occurred()) return NULL;
    if (move.op < 0 || move.op >= OPS || move.kind < 0 || move.kind >= KINDS)
        return PyErr_Format(PyExc_ValueError, "unknown call %d of kind %d", move.op, move.kind);
    u64 elements = move.count;
    if (move.op == EXCHANGE) elements = total(move.sizes, 2 * group->size);
    if (move.op == RELAY) elements = move.sizes[0] + move.sizes[1];
    /* Other threads may run while large data is copied, and while this rank waits. */
    PyThreadState *thread = elements * move.itemsize > LARGE ? PyEval_SaveThread() : NULL;
    write_data(group, &move, meeting.epoch);
    publish(group, &meeting);
    int seen = seen_soon(group, &meeting);
    if (!seen) {
        PyThreadState *waiting = thread ? NULL : PyEval_SaveThread();
        seen = seen_later(group, &meeting);
        if (waiting) PyEval_RestoreThread(waiting);
    }
    int status = seen ? finish(group, &move, &meeting) : LATE;
    if (thread) PyEval_RestoreThread(thread);
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"attach", (PyCFunction)(void (*)(void))attach, METH_FASTCALL, "The memory of a group, for `run`."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "Make a call; returns whether it is done, see native.c."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The data path of the shm backend in C; see native.c.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "LAYOUT", LAYOUT) < 0) Py_CLEAR(module);
    return module;
}

#endif
