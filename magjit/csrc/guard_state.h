/* The entries of torch's global state: see guard_global.c. */
#ifndef MAGJIT_GUARD_STATE_H
#define MAGJIT_GUARD_STATE_H

#include "guard_torch.h"

typedef struct entry entry;

typedef enum {
    K_BYTE,      /* exported function -> bool or 8-bit enum; its argument, if any, is the Context */
    K_INT,       /* the same, 32 bits */
    K_FLAG,      /* exported bool */
    K_PRECISION, /* Context::float32Precision(backend, operation) */
    K_AUTOCAST,  /* dtype while enabled for a device type, else -1 */
    K_TLS_KEY,   /* whether a dispatch key is included for this thread */
    K_CALL,      /* function of torch._C */
    K_VARIABLE,  /* variable of a module */
    K_STACK,     /* stack of modes, as a tuple */
    K_LEVEL,     /* innermost functorch level, or None */
} entry_kind;

struct entry {
    const char *name;
    entry_kind kind;
    const char *symbol; /* exported function or bool, or NULL; of K_CALL: 8 bits that tell values
                         * apart */
    const char *module; /* where the Python function or variable is */
    const char *attribute;
    int first, second; /* arguments */
    void *function;
    PyObject *object; /* the Python function, or the dict that holds the variable */
    PyObject *key;
    Py_hash_t hash;
    bool present;
};

extern const entry *const mj_entries;
extern const int mj_n_entries;
/* Of `with torch.device(...)`; NULL: not known. */
extern PyObject *mj_device_context_type;

/* What torch's libraries export, NULL: nothing. */
typedef struct {
    bool ready;
    void *context;
    bool (*autocast_enabled)(int8_t device_type);
    int8_t (*autocast_dtype)(int8_t device_type);
    bool (*key_included)(uint16_t key);
    int tracer_key, functorch_key;
} state_library;

extern state_library mj_state_library;

/* Fills the entries once torch is there; -1 with an exception if it is not. */
int mj_entries_prepare(void);
/* New reference; NULL without an exception if torch does not tell. */
PyObject *mj_entry_value(const entry *e);
/* Of the kind K_STACK. */
bool mj_entry_stack_is_empty(const entry *e);

static inline bool
mj_entry_is_number(const entry *e)
{
    return e->kind <= K_TLS_KEY && (e->function != NULL || e->object == NULL);
}

static inline int64_t
mj_entry_number(const entry *e)
{
    const state_library *lib = &mj_state_library;
    switch (e->kind) {
    case K_BYTE:
        return ((uint8_t (*)(void *))e->function)(lib->context);
    case K_INT:
        return ((int32_t (*)(void *))e->function)(lib->context);
    case K_FLAG:
        return *(const bool *)e->function;
    case K_PRECISION:
        return ((int32_t (*)(void *, int32_t, int32_t))e->function)(lib->context, e->first,
                                                                    e->second);
    case K_AUTOCAST:
        return lib->autocast_enabled((int8_t)e->first) ? lib->autocast_dtype((int8_t)e->first) : -1;
    default:
        return lib->key_included((uint16_t)lib->tracer_key);
    }
}

/* As long as it is the same, so is the value of an entry that is not a number; 0: it does not
 * tell. */
static inline uint64_t
mj_entry_mark(const entry *e)
{
    if (e->kind == K_VARIABLE) {
        return mj_dict_version(e->object);
    }
    return e->kind == K_CALL && e->function != NULL ? ((uint8_t (*)(void))e->function)() + 1 : 0;
}

#endif /* MAGJIT_GUARD_STATE_H */
