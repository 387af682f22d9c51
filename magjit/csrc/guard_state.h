/* The entries of torch's global state: see guard_global.c. */
#ifndef MAGJIT_GUARD_STATE_H
#define MAGJIT_GUARD_STATE_H

#include "guard_torch.h"

typedef struct entry entry;

typedef enum {
    K_BYTE,      /* exported function -> bool or 8-bit enum; its argument, if any, is the Context */
    K_INT,       /* the same, 32 bits */
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
    const char *symbol; /* exported function, or NULL */
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

/* Fills the entries once torch is there; -1 with an exception if it is not. */
int mj_entries_prepare(void);
int64_t mj_entry_number(const entry *e);
/* New reference; NULL without an exception if torch does not tell. */
PyObject *mj_entry_value(const entry *e);
/* Of the kind K_STACK. */
bool mj_entry_stack_is_empty(const entry *e);

static inline bool
mj_entry_is_number(const entry *e)
{
    return e->kind <= K_TLS_KEY && (e->function != NULL || e->object == NULL);
}

#endif /* MAGJIT_GUARD_STATE_H */
