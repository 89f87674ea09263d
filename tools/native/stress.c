/* The data path in C under random calls and delays: threads are the ranks of a group, each call is compared with what it
   must give. Arguments: ranks, calls, seed. Built by `python -m tools.native`, with and without sanitizers. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void anywhere(void);
#define ANYWHERE() anywhere()
#define GRADMESH_WITHOUT_PYTHON
#include "../../src/gradmesh/backends/shm/native.c"

enum { CHUNK = 4096, MOST = 8, ITEM = 4 };

static u64 ranks, calls, seed;
static char *memory;
static _Thread_local u64 delays; /* a generator of this rank's own */

static u64 next(u64 *state) { /* splitmix64, Steele, Lea and Flood 2014 */
    u64 z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void anywhere(void) {
    u64 drawn = next(&delays);
    if (drawn % 64 == 0) sched_yield();
    if (drawn % 50000 == 1) nanosleep(&(struct timespec){0, (long)(drawn >> 40) % 200000}, NULL);
    if (drawn % 16 == 2) for (u64 i = drawn >> 56; i; i--) pause_briefly();
}

static uint32_t value(u64 call, u64 rank, u64 index) {
    u64 state = (call << 20) ^ (rank << 14) ^ index ^ seed;
    return (uint32_t)next(&state);
}

static void fail(const char *what, u64 call, u64 rank, int op) {
    fprintf(stderr, "call %llu, operation %d, rank %llu: %s\n", (unsigned long long)call, op, (unsigned long long)rank, what);
    _exit(1);
}

static u64 size_drawn(u64 *shared, u64 most) {
    u64 drawn = next(shared);
    return drawn % 4 == 0 ? drawn / 4 % 20 : drawn / 4 % (most + 1);
}

/* The value that the call must give at an index of this rank's result. */
static uint32_t expected(int op, u64 call, u64 rank, u64 count, u64 root, u64 index) {
    uint32_t found = 0;
    switch (op) {
    case ALL_GATHER: return value(call, index / count, index % count);
    case BROADCAST: return value(call, root, index);
    case EXCHANGE_EVEN: return value(call, index / count, rank * count + index % count);
    case REDUCE_SCATTER: index += rank * count; /* fall through */
    case ALL_REDUCE:
    case REDUCE:
        for (u64 source = 0; source < ranks; source++) found += value(call, source, index);
    }
    return found;
}

static void *work(void *argument) {
    u64 rank = (u64)(uintptr_t)argument, shared = seed;
    static _Thread_local uint32_t given[MOST * CHUNK / ITEM], out[MOST * CHUNK / ITEM];
    u64 counts = 2 * ranks * ranks * sizeof(u64), lines = LINE + ranks * RANK_LINES;
    Group group = {
        .lines = memory + LINE,
        .counts = {(u64 *)(memory + lines), (u64 *)(memory + lines + counts)},
        .chunks = memory + lines + 2 * counts,
        .rank = rank,
        .size = ranks,
        .chunk = CHUNK,
    };
    delays = seed ^ rank << 32;
    for (u64 call = 1; call <= calls; call++) {
        int op = (int)(next(&shared) % (RELAY + 2));
        u64 parts = op == REDUCE_SCATTER || op == EXCHANGE_EVEN ? ranks - 1 : 1;
        u64 count = size_drawn(&shared, CHUNK / ITEM / (parts ? parts : 1)), root = next(&shared) % ranks;
        u64 sizes[2 * MOST], own = 0, length = 0;
        Move move = {.op = op, .kind = 5, .itemsize = ITEM, .out = (char *)out, .given = (char *)given, .count = count,
                     .extra = (int64_t)root, .sizes = sizes};
        u64 table[MOST][MOST] = {{0}};
        for (u64 s = 0; s < ranks; s++)
            for (u64 t = 0; t < ranks; t++) table[s][t] = size_drawn(&shared, CHUNK / ITEM / ranks);
        switch (op) {
        case ALL_GATHER: own = count, length = ranks * count; break;
        case ALL_REDUCE: own = length = count; break;
        case REDUCE: own = count, length = rank == root ? count : 0; break;
        case BROADCAST: own = rank == root ? count : 0, length = count; break;
        case REDUCE_SCATTER: own = ranks * count, length = count; break;
        case EXCHANGE_EVEN: own = length = ranks * count; break;
        case EXCHANGE:
            for (u64 r = 0; r < ranks; r++) {
                own += sizes[r] = table[rank][r];
                length += sizes[ranks + r] = table[r][rank];
            }
            break;
        case RELAY: /* from the rank before; the first one receives nothing */
            own = sizes[0] = table[rank][0];
            length = sizes[1] = rank ? table[rank - 1][0] : 0;
            move.extra = (int64_t)rank - 1;
            if (ranks < 2) continue;
        }
        for (u64 i = 0; i < own; i++) given[i] = value(call, rank, i);
        Meeting meeting = {.hash = call << 34 | rank, .flags = ((u64)1 << 34) - 1, .epoch = call, .pauses = 20,
                           .yields = next(&delays) % 3, .nanoseconds = 1000000};
        write_data(&group, &move, call);
        publish(&group, &meeting);
        for (u64 tries = 0; !seen_soon(&group, &meeting) && !seen_later(&group, &meeting); tries++)
            if (tries > 20000) fail("timed out", call, rank, op);
        int status = finish(&group, &move, &meeting);
        if (status != (ranks > 1 ? FLAGS_DIFFER : DONE)) fail("was not made", call, rank, op);
        u64 at = 0;
        for (u64 i = 0; op != EXCHANGE && op != RELAY && i < length; i++)
            if (out[i] != expected(op, call, rank, count, root, i)) fail("has another value", call, rank, op);
        for (u64 source = 0; op == EXCHANGE && source < ranks; source++) {
            u64 before = total(table[source], rank);
            for (u64 i = 0; i < table[source][rank]; i++)
                if (out[at++] != value(call, source, before + i)) fail("has another value", call, rank, op);
        }
        for (u64 i = 0; op == RELAY && i < length; i++)
            if (out[i] != value(call, rank - 1, i)) fail("has another value", call, rank, op);
    }
    return NULL;
}

int main(int number, char **arguments) {
    if (number != 4) return 2;
    ranks = strtoull(arguments[1], NULL, 10), calls = strtoull(arguments[2], NULL, 10), seed = strtoull(arguments[3], NULL, 10);
    if (!ranks || ranks > MOST) return 2;
    size_t bytes = LINE + ranks * RANK_LINES + 4 * ranks * ranks * sizeof(u64) + 2 * ranks * CHUNK;
    memory = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    memset(memory, 0, bytes);
    pthread_t threads[MOST];
    for (u64 rank = 0; rank < ranks; rank++)
        if (pthread_create(&threads[rank], NULL, work, (void *)(uintptr_t)rank)) return 2;
    for (u64 rank = 0; rank < ranks; rank++) pthread_join(threads[rank], NULL);
    free(memory);
    printf("%llu calls on %llu ranks: right\n", (unsigned long long)calls, (unsigned long long)ranks);
    return 0;
}
