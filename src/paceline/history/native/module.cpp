// Python bindings of the native history index.
#include <nanobind/nanobind.h>

#include "version.h"

NB_MODULE(_native, module) {
    module.doc() = "The history index in C++.";
    module.def("version", &paceline::version, "The version of paceline that this extension was built from.");
}
