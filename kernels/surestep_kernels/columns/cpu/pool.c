#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HELPERS = 255 };

/* How long an idle helper polls for the next job before it sleeps. Longer than the gap between
 * two ops of one step, far shorter than the gap between two steps: the core is then free for the
 * other services of the machine. */
static const long SPIN_NS = 100000;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* held by the thread that has a job */
static pthread_mutex_t resize = PTHREAD_MUTEX_INITIALIZER;
static task_fn current_task;
static const void *current_job;
/* Tasks of the job in the high half, the next one to claim in the low half. In one word, so that
 * a claim that arrives late sees either no task or a task of a job that waits for it. */
static _Atomic uint64_t ticket;
static _Atomic long done;
static _Atomic uint32_t wakeups; /* futex word */
static _Atomic int sleepers;
static _Atomic int helpers_wanted;
static int helpers_started;

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static int has_task(uint64_t t) { return (uint32_t)t < (uint32_t)(t >> 32); }

/* Claim and run one task; 0 when there is none. */
static int run_one(void)
{
    if (!has_task(atomic_load_explicit(&ticket, memory_order_relaxed))) return 0;
    uint64_t claimed = atomic_fetch_add(&ticket, 1);
    if (!has_task(claimed)) return 0;
    current_task(current_job, (long)(uint32_t)claimed);
    atomic_fetch_add_explicit(&done, 1, memory_order_release);
    return 1;
}

static void spin(int id)
{
    long deadline = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (id < atomic_load_explicit(&helpers_wanted, memory_order_relaxed) && run_one()) {
                while (run_one()) {}
                deadline = now_ns() + SPIN_NS;
            }
            pause_cpu();
        }
    } while (now_ns() < deadline);
}

static void *help(void *arg)
{
    int id = (int)(intptr_t)arg;
    for (;;) {
        if (id < atomic_load(&helpers_wanted)) spin(id);
        uint32_t seen = atomic_load(&wakeups);
        atomic_fetch_add(&sleepers, 1);
        if (id >= atomic_load(&helpers_wanted) || !has_task(atomic_load(&ticket)))
            syscall(SYS_futex, &wakeups, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&sleepers, 1);
    }
    return NULL;
}

static void wake_helpers(void)
{
    if (atomic_load(&sleepers) == 0) return;
    atomic_fetch_add(&wakeups, 1);
    syscall(SYS_futex, &wakeups, FUTEX_WAKE_PRIVATE, MAX_HELPERS, NULL, NULL, 0);
}

static void finish_job(long count)
{
    while (run_one()) {}
    for (int i = 0; atomic_load_explicit(&done, memory_order_acquire) < count; i++) {
        if (i < 1000) pause_cpu();
        else sched_yield(); /* the helper that we wait for was preempted */
    }
}

void parallel_for(task_fn task, const void *job, long count)
{
    int alone = count < 2 || atomic_load_explicit(&helpers_wanted, memory_order_relaxed) == 0;
    if (alone || pthread_mutex_trylock(&busy) != 0) {
        for (long i = 0; i < count; i++) task(job, i);
        return;
    }
    current_task = task;
    current_job = job;
    atomic_store_explicit(&done, 0, memory_order_relaxed);
    atomic_store(&ticket, (uint64_t)count << 32);
    wake_helpers();
    finish_job(count);
    pthread_mutex_unlock(&busy);
}

static int start_helper(int id)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the interpreter's threads */
    int failed = pthread_create(&thread, NULL, help, (void *)(intptr_t)id);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return 0;
    pthread_detach(thread);
    return 1;
}

void surestep_set_num_threads(int num_threads)
{
    int wanted = num_threads < 1 ? 0 : num_threads - 1;
    if (wanted > MAX_HELPERS) wanted = MAX_HELPERS;
    pthread_mutex_lock(&resize);
    while (helpers_started < wanted && start_helper(helpers_started)) helpers_started++;
    atomic_store(&helpers_wanted, wanted);
    pthread_mutex_unlock(&resize);
}
