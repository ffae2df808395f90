// The version that the extension was built from, so that an extension left over from an older one is noticed.
#pragma once

namespace paceline {

inline const char* version() { return PACELINE_VERSION; }

}  // namespace paceline
