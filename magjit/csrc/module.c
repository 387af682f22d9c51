/* magjit._C: the one extension module.  Each C file registers what it exports. */
#include "magjit.h"

typedef int (*init_function)(PyObject *module);

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "magjit._C",
    .m_doc = "Tracer, value stack, guard programs, dispatch and frame hook of MagJIT.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    static const init_function inits[] = {
        mj_init_frames,   mj_init_tracer, mj_init_guard, mj_init_dispatch,
        mj_init_shell,    mj_init_hook,   mj_init_thunk, mj_init_step,
        mj_init_reading,  mj_init_garbage,
    };
    PyObject *module = PyModule_Create(&module_def);
    if (module == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(inits) / sizeof(inits[0]); i++) {
        if (inits[i](module) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
    return module;
}
