// Lines for people, one for each call that fails, in the layout of the API's Python logger but on stderr.
#pragma once

#include <string_view>

namespace llm_datadist {

enum class Level { debug = 0, info = 1, warning = 2, error = 3 };

// From ASCEND_GLOBAL_LOG_LEVEL, 0 to 3; error where it says nothing else. Read once.
Level log_level() noexcept;
void log_line(Level level, std::string_view function, std::string_view sentence) noexcept;

}  // namespace llm_datadist
