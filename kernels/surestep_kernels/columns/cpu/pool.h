/* A thread pool for jobs of a few microseconds.
 *
 * The caller works too, and never waits for a helper to arrive: helpers claim single tasks from
 * a shared counter, so a helper that sleeps or was preempted costs nothing but its help. Which
 * thread runs a task never changes its result.
 */
#pragma once

typedef void (*task_fn)(const void *job, long index);

/* Run task(job, i) for 0 <= i < count and return when all are done. */
void parallel_for(task_fn task, const void *job, long count);

/* Threads that a job may use, the caller included. */
void surestep_set_num_threads(int num_threads);
