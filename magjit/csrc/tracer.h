/* The tracer: data structures shared by its files.
 *
 *   tracer.c             the Python type, start/stop/pause/resume
 *   tracer_core.c        the protocol: frame entered, instruction, frame left
 *   tracer_tables.c      plans, the stack of frames, suspended generators, trivial types
 *   events_settrace.c    source of events on CPython 3.11
 *   events_monitoring.c  source of events on CPython 3.12 and later
 *
 * Vocabulary.  A *unit* is a code unit (two bytes) of a code object, CACHE entries included.  An
 * *observed frame* is one that on_frame gave a state for; an *opaque frame* is one for which it
 * gave None: until it exits nothing that it calls is reported.  Other frames have no entry at all.
 */
#ifndef MAGJIT_TRACER_H
#define MAGJIT_TRACER_H

#include "frames.h"

/* One record per code unit.  magjit.bytecode.decode writes them (UNIT_LAYOUT there): keep both in
 * step.
 *
 * kind     EventKind, 0 = no event; with MJ_FILTER, no event if all inputs are of trivial types
 * mode     low nibble: how inputs are read; high nibble: how posts are read
 * depth    of the value stack before the instruction; MJ_UNREACHABLE: never executed
 * ninputs  stack values that are inputs
 * nposts   stack values given to the post handler at the next instruction
 * operand  INPUT_CELL: index into localsplus; INPUT_FILL: number of values that go in;
 *          POST_ITERATION: unit of the event after the end
 * home     unit of the instruction itself, where this one is its EXTENDED_ARG prefix
 * next     unit of the next event when this instruction falls through
 */
typedef struct {
    uint8_t kind, mode;
    uint16_t depth, ninputs, nposts;
    uint32_t operand, home, next;
} mj_unit;

#define MJ_FILTER 0x80
#define MJ_HOLD 32 /* EventKind.HOLD: reported only where an input is a watched object */
#define MJ_QUIET 1 /* mode of a unit of kind 0 that comes after no event: it need not be seen */
#define MJ_UNREACHABLE 0xFFFF
#define MJ_KINDS 128
#define MJ_PRESENT 1024
#define MJ_WATCHED 4096

enum mj_input_mode {
    INPUT_STACK = 0,      /* the top ninputs values */
    INPUT_CELL = 1,       /* those, then localsplus[operand] */
    INPUT_CALL = 2,       /* [NULL, callable] or [callable, self], arguments (3.11, 3.12) */
    INPUT_CALL13 = 3,     /* [callable, NULL] or [callable, self], arguments (3.13) */
    INPUT_CALL_KW13 = 4,  /* as above; the names of keywords on top are not an input */
    INPUT_CALL_EX = 5,    /* [NULL, callable, args, kwargs?] (3.11, 3.12) */
    INPUT_CALL_EX13 = 6,  /* [callable, NULL, args, kwargs?] (3.13) */
    INPUT_WITH_EXIT = 7,  /* [exit, lasti, previous, exception]: exit(type, exception, traceback) */
    INPUT_NAMESPACE = 8,  /* the stack values, then the frame's locals mapping */
    INPUT_NONE_TEST = 9,  /* the value, then None: an identity test */
    INPUT_SLICE = 10,     /* [..., start, stop]: the last two as one slice object */
    INPUT_BELOW_TOP = 11, /* the values below the topmost one */
    INPUT_FILL = 12,      /* the container, which is the lowest, then the topmost operand values */
};

enum mj_post_mode {
    POST_STACK = 0x00,
    POST_METHOD13 = 0x10,  /* [method, self] as it is; [value, NULL] given as (NULL, value) */
    POST_DROP_NULL = 0x20, /* a NULL pushed on top is not a value */
    POST_ITERATION = 0x30, /* (value,), or (NULL,) where the iteration ended by a jump */
};

/* What the tracer knows of a code object for the length of one run. */
typedef struct {
    PyCodeObject *code;   /* strong */
    PyObject *plan;       /* strong, bytes; NULL until a frame of this code is observed */
    const mj_unit *units; /* inside plan */
    Py_ssize_t n_units;
    bool skip_always; /* on_frame returned SKIP_ALWAYS: opaque without asking again */
    int local_events; /* events_monitoring.c: events switched on for this code object */
} mj_code;

/* A frame on the stack of observed and opaque frames. */
typedef struct {
    mj_frame *frame;   /* identity only: read only while it is the frame of the current event */
    mj_code *code;     /* borrowed from the table of codes */
    PyObject *state;   /* strong; NULL: an opaque frame */
    PyObject *pending; /* strong or NULL: post handler of the instruction before the next event */
    const mj_unit *pending_unit;
    PyObject *wake; /* strong or NULL: called at the next event of this frame, before its handler */
    bool opaque; /* frames entered now are not reported */
    /* 3.11: f_trace_opcodes and f_trace_lines as they were before */
    bool restore_opcodes, restore_lines;
} mj_entry;

/* A generator or coroutine that yielded: its entry waits here until it is resumed. */
typedef struct {
    mj_frame *frame;
    PyObject *generator; /* strong, a weak reference: see mj_suspended_find */
    mj_code *code;
    PyObject *state;   /* strong; NULL for an opaque or an ignored frame */
    PyObject *pending; /* strong or NULL */
    const mj_unit *pending_unit;
    bool ignored; /* on_frame returned False */
} mj_suspended;

typedef struct {
    PyTypeObject *type;
} mj_type_slot;

typedef struct Tracer {
    PyObject_HEAD
    PyObject *on_frame, *on_exit, *plan_for;
    PyObject *trivial;            /* the frozenset keeps the types in the table alive */
    PyObject *handlers[MJ_KINDS]; /* strong or NULL */
    mj_type_slot *trivial_slots;  /* open addressing, a power of two */
    size_t trivial_mask;

    mj_code **codes; /* open addressing, a power of two */
    size_t codes_mask, codes_used;
    mj_entry *entries;
    Py_ssize_t depth, capacity;
    uint16_t present[MJ_PRESENT]; /* entries per hash: one look rules most frames out */
    uint8_t watched[MJ_WATCHED];  /* by hash: an object of this hash is watched */
    bool watches;
    mj_frame *handling;           /* the frame whose instruction event a handler is looking at */
    mj_suspended *suspended;
    Py_ssize_t n_suspended, suspended_capacity;

    PyObject *error;       /* what a handler raised, or NULL */
    PyThreadState *tstate; /* the observed thread while running, else NULL */
    bool running;          /* between start() and stop() */
    bool attached;         /* events arrive; false after an error */
    bool confines;         /* events arrive also after a handler has stopped the program */
    bool resuming;         /* on_frame is asked about a frame that is already under way */
    int paused;
    unsigned long long n_instructions, n_handled, n_frames;

    Py_tracefunc previous_func; /* 3.11: the trace function that was there before */
    PyObject *previous_object;
    PyObject *monitoring; /* 3.12+: sys.monitoring, and the claimed tool */
    int tool_id;
    bool other_tools;     /* are in use: their LINE callbacks may hide instructions from ours */
    mj_frame *line_frame; /* identity only: a LINE event has stood for the instruction line_unit */
    int line_unit;
} Tracer;

/* The tracer that observes now, a strong reference: at most one in the process. */
extern Tracer *mj_active_tracer;

static inline size_t
mj_hash_pointer(const void *pointer)
{
    uintptr_t bits = (uintptr_t)pointer;
    return (size_t)((bits >> 4) ^ (bits >> 12));
}

/* ---- tracer_tables.c; failure: NULL or -1, with an exception ---- */
mj_code *mj_code_find(Tracer *tracer, PyCodeObject *code); /* made if need be */
int mj_code_load_plan(Tracer *tracer, mj_code *code);
mj_entry *mj_entry_find(Tracer *tracer, const mj_frame *frame); /* NULL, no exception: none */
mj_entry *mj_entry_push(Tracer *tracer, mj_frame *frame, mj_code *code, PyObject *state);
void mj_entry_pop(Tracer *tracer);
void mj_entries_drop_above(Tracer *tracer, Py_ssize_t depth);
void mj_entries_drop_dead(Tracer *tracer);
int mj_suspend(Tracer *tracer, const mj_entry *entry, bool ignored, mj_frame *frame);
mj_suspended *mj_suspended_find(Tracer *tracer, const mj_frame *frame, bool first);
void mj_suspended_drop_dead(Tracer *tracer);
void mj_suspended_remove(Tracer *tracer, mj_suspended *item);
int mj_trivial_build(Tracer *tracer, PyObject *types);
bool mj_trivial_contains(const Tracer *tracer, const PyTypeObject *type);
void mj_tables_clear(Tracer *tracer);
int mj_tables_traverse(Tracer *tracer, visitproc visit, void *arg);

/* ---- tracer_core.c: 0, or -1 with an exception that must reach the program ---- */
int mj_on_entry(Tracer *tracer, mj_frame *frame, bool first);
/* 1: this unit need not be seen again */
int mj_on_instruction(Tracer *tracer, mj_frame *frame, int unit);
/* value NULL: unwound by an exception */
int mj_on_exit(Tracer *tracer, mj_frame *frame, PyObject *value);
int mj_on_yield(Tracer *tracer, mj_frame *frame);

/* ---- events_*.c ---- */
int mj_events_attach(Tracer *tracer);
/* Takes back what attach switched on.  An interrupt that comes meanwhile, in the Python code of an
 * audit hook, is raised afterwards: -1.  May be called again: does what could not be done before. */
int mj_events_detach(Tracer *tracer);

enum { MJ_DETACH_TRIES = 5 };
void mj_keep_interrupt(PyObject **interrupt);   /* takes the exception that is set */
int mj_raise_interrupt(PyObject *interrupt);    /* steals; 0 when it is NULL */
/* Switches the events of this frame on, and back to what they were. */
int mj_events_observe(Tracer *tracer, mj_entry *entry, mj_frame *frame);
void mj_events_release(Tracer *tracer, mj_entry *entry, mj_frame *frame);
void mj_events_pause(Tracer *tracer);
void mj_events_resume(Tracer *tracer);

#endif /* MAGJIT_TRACER_H */
