/* A small thread pool for inference steps.

   A step takes the idle helpers that it may have, at most its share when several threads of the program run steps at
   the same time. Helpers wait awake for a moment, because the next step mostly follows at once, then sleep. On a busy
   machine, where a thread of a team may lose its core and all others wait for it, steps run on one thread for a while. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

#include "step.h"

#define MAX_HELPERS 63
#define MAX_CALLERS 64
#define AWAKE_SPINS 4000                /* of a helper without work, about 100 to 200 µs */
#define YIELD_SPINS 1000                /* of a thread at a barrier, before it offers its core to others */
#define STALL_NS (2 * 1000000)          /* who waits so long waits for a thread without a core, not for its work */
#define STEPS_ALONE 64                  /* on one thread after a stall */
#define CALLER_LIFETIME_NS (3 * 1000000) /* a thread that ran a step so recently counts as a caller */

enum helper_state { IDLE, CLAIMED, READY };

struct team {
    team_work work;
    void *context;
    int64_t size;
    atomic_llong next, arrived, phase, running;
};

struct helper {
    atomic_int state;
    struct team *team;
    int64_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int sleeping;
};

static struct helper helpers[MAX_HELPERS];
static atomic_int num_helpers;
static atomic_int steps_alone;
static pthread_mutex_t start_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static struct caller {
    atomic_ullong thread, last; /* 0: free; time of its last step */
} callers[MAX_CALLERS];

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static unsigned long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (unsigned long long)time.tv_sec * 1000000000ull + (unsigned long long)time.tv_nsec;
}

struct wait {
    int64_t spins;
    unsigned long long since; /* 0: not long enough to ask for the time */
};

/* Wait a little for the other threads of a team: spin, then offer the core to others. */
static inline void wait_for_team(struct wait *wait) {
    if (wait->spins++ < YIELD_SPINS) {
        relax();
        return;
    }
    sched_yield();
    if (wait->spins % 16) return;
    const unsigned long long time = now();
    if (!wait->since) wait->since = time;
    else if (time - wait->since > STALL_NS) atomic_store_explicit(&steps_alone, STEPS_ALONE, memory_order_relaxed);
}

int64_t clearhead_team_size(const struct team *team) { return team->size; }

int64_t clearhead_take(struct team *team, int64_t items) {
    if (team->size == 1) { /* without the cost of an atomic addition */
        const int64_t next = atomic_load_explicit(&team->next, memory_order_relaxed);
        atomic_store_explicit(&team->next, next + 1, memory_order_relaxed);
        return next < items ? next : -1;
    }
    const int64_t item = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
    return item < items ? item : -1;
}

void clearhead_barrier(struct team *team) {
    if (team->size == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    const long long phase = atomic_load_explicit(&team->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    struct wait wait = {0, 0};
    while (atomic_load_explicit(&team->phase, memory_order_acquire) == phase) wait_for_team(&wait);
}

static void *help(void *argument) {
    struct helper *helper = argument;
    for (;;) {
        for (int spins = 0; spins < AWAKE_SPINS; spins++) {
            if (atomic_load_explicit(&helper->state, memory_order_acquire) == READY) break;
            relax();
        }
        if (atomic_load_explicit(&helper->state, memory_order_acquire) != READY) {
            pthread_mutex_lock(&helper->mutex);
            helper->sleeping = 1;
            while (atomic_load_explicit(&helper->state, memory_order_acquire) != READY)
                pthread_cond_wait(&helper->wake, &helper->mutex);
            helper->sleeping = 0;
            pthread_mutex_unlock(&helper->mutex);
        }
        struct team *team = helper->team;
        team->work(team->context, team, helper->thread);
        atomic_fetch_sub_explicit(&team->running, 1, memory_order_release); /* the team may be gone after this */
        atomic_store_explicit(&helper->state, IDLE, memory_order_release);
    }
    return NULL;
}

static void forget_helpers(void) { /* threads do not survive a fork */
    atomic_store(&num_helpers, 0);
    for (int n = 0; n < MAX_CALLERS; n++) atomic_store(&callers[n].thread, 0);
    pthread_mutex_init(&start_mutex, NULL);
}
static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_helpers); }

/* Start helpers until there are `count`; where the system refuses, there are fewer. */
static void start_helpers(int64_t count) {
    pthread_once(&fork_once, watch_forks);
    pthread_mutex_lock(&start_mutex);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    for (int n = atomic_load(&num_helpers); n < count; n++) {
        struct helper *helper = &helpers[n];
        atomic_store(&helper->state, IDLE);
        helper->sleeping = 0;
        pthread_mutex_init(&helper->mutex, NULL);
        pthread_cond_init(&helper->wake, NULL);
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, helper)) break;
        pthread_detach(thread);
        atomic_store(&num_helpers, n + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&start_mutex);
}

/* Note that this thread runs a step; return how many threads do so now or did a moment ago. */
static int64_t count_callers(struct caller **own) {
    const unsigned long long self = (unsigned long long)(uintptr_t)pthread_self(), time = now();
    int64_t count = 0;
    *own = NULL;
    for (int n = 0; n < MAX_CALLERS; n++) {
        struct caller *caller = &callers[n];
        const unsigned long long thread = atomic_load_explicit(&caller->thread, memory_order_relaxed);
        const unsigned long long last = atomic_load_explicit(&caller->last, memory_order_relaxed);
        if (thread == self) *own = caller;
        else if (thread && (last > time || time - last < CALLER_LIFETIME_NS)) count++;
    }
    for (int n = 0; n < MAX_CALLERS && !*own; n++) { /* a slot that is free or whose thread has stopped */
        unsigned long long thread = atomic_load_explicit(&callers[n].thread, memory_order_relaxed);
        const unsigned long long last = atomic_load_explicit(&callers[n].last, memory_order_relaxed);
        if (thread && (last > time || time - last < CALLER_LIFETIME_NS)) continue;
        if (atomic_compare_exchange_strong(&callers[n].thread, &thread, self)) *own = &callers[n];
    }
    if (*own) atomic_store_explicit(&(*own)->last, ~0ull, memory_order_relaxed); /* running */
    return count + 1;
}

void clearhead_run_team(team_work work, void *context, int64_t threads) {
    struct team team = {.work = work, .context = context, .size = 1};
    struct helper *members[MAX_HELPERS];
    struct caller *caller;
    const int64_t share = threads / count_callers(&caller);
    int64_t wanted = share < 1 ? 0 : share > MAX_HELPERS ? MAX_HELPERS : share - 1;
    if (wanted && atomic_load_explicit(&steps_alone, memory_order_relaxed) > 0) {
        atomic_fetch_sub_explicit(&steps_alone, 1, memory_order_relaxed);
        wanted = 0;
    }
    if (wanted > atomic_load_explicit(&num_helpers, memory_order_acquire)) start_helpers(wanted);
    const int started = atomic_load_explicit(&num_helpers, memory_order_acquire);
    for (int n = 0; n < started && team.size <= wanted; n++) {
        int idle = IDLE;
        if (atomic_compare_exchange_strong_explicit(&helpers[n].state, &idle, CLAIMED, memory_order_acquire,
                                                    memory_order_relaxed))
            members[team.size++ - 1] = &helpers[n];
    }
    atomic_store_explicit(&team.running, team.size - 1, memory_order_relaxed);
    for (int64_t n = 1; n < team.size; n++) {
        struct helper *helper = members[n - 1];
        helper->team = &team, helper->thread = n;
        atomic_store_explicit(&helper->state, READY, memory_order_release);
        pthread_mutex_lock(&helper->mutex);
        if (helper->sleeping) pthread_cond_signal(&helper->wake);
        pthread_mutex_unlock(&helper->mutex);
    }
    work(context, &team, 0);
    struct wait wait = {0, 0};
    while (atomic_load_explicit(&team.running, memory_order_acquire) > 0) wait_for_team(&wait);
    if (caller) atomic_store_explicit(&caller->last, now(), memory_order_relaxed);
}
