// Sentences for exceptions: said("rank ", 3, " is missing").
#pragma once

#include <sstream>
#include <string>

namespace llm_datadist::rules {

template <class... Words>
std::string said(const Words&... words) {
  std::ostringstream out;
  (out << ... << words);
  return out.str();
}

}  // namespace llm_datadist::rules
