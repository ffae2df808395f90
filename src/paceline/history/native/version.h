// The version of paceline that the extension was built from.
#pragma once

namespace paceline {

inline const char* version() { return PACELINE_VERSION; }

}  // namespace paceline
