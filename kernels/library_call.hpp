// Calls a function of a shared library that the process has loaded privately, as Python loads its extensions'
// libraries: such symbols are not found by the linker, only through the library's own handle.
#pragma once

#include <string>

#include <dlfcn.h>

namespace nexus {

// Whether the library at path is loaded and has `void symbol(int)`, which was then called with value.
inline bool call_with_int(const std::string & path, const std::string & symbol, int value) {
    void * library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return false;
    }
    auto * function = reinterpret_cast<void (*)(int)>(dlsym(library, symbol.c_str()));
    if (function != nullptr) {
        function(value);
    }
    dlclose(library);
    return function != nullptr;
}

}  // namespace nexus
