// The version that the extension reports.
#include <cstring>

#include "check.h"
#include "version.h"

TEST(the_version_is_a_number_with_dots) {
    const char* version = paceline::version();
    CHECK(std::strlen(version) >= 3);
    CHECK(std::strspn(version, "0123456789.") == std::strlen(version));
}
