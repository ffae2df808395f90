// Where the memory of large tables comes from.
#include "grams.h"

#include <cstdlib>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define PACELINE_MMAP 1
#else
#define PACELINE_MMAP 0
#endif

namespace paceline {

namespace {

constexpr size_t kManyBytes = size_t{1} << 16;

}  // namespace

void* take_zeroed(size_t bytes) {
#if PACELINE_MMAP
    if (bytes >= kManyBytes) {
        void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        return mapped;
    }
#endif
    void* memory = std::calloc(bytes, 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void give_back(void* memory, size_t bytes) noexcept {
#if PACELINE_MMAP
    if (bytes >= kManyBytes) {
        munmap(memory, bytes);
        return;
    }
#else
    static_cast<void>(bytes);
#endif
    std::free(memory);
}

}  // namespace paceline
