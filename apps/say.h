// What the programs say besides their output: notes on stderr, answers to questions such as --plan
// on stdout. Threads: any; each call is one write, so lines of several threads stay whole.
#pragma once

#include <string_view>

namespace colibri {

// A line on stderr. That nobody reads it is no reason to end: errors are ignored.
void Say(std::string_view line);
// The same without line end.
void SayPart(std::string_view text);
// Text on stdout, flushed. Throws IoError.
void Print(std::string_view text);

}  // namespace colibri
