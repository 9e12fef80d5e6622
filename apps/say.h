// What the programs say besides their output: notes on stderr, answers to questions such as --plan
// on stdout, and a line of a terminal that is drawn again and again.
// Threads: any; each call is one write, so lines of several threads stay whole.
#pragma once

#include <string_view>

namespace colibri {

// A line on stderr. That nobody reads it is no reason to end: errors are ignored.
void Say(std::string_view line);
// The same for text that has its line ends.
void SayPart(std::string_view text);
// Draws `line` in the terminal's last line, in place of the one shown before; what is said
// meanwhile goes above it. No wider than the terminal. "": nothing is shown any more, and the
// cursor stands at the beginning of an empty line.
void ShowStatus(std::string_view line);
// Says `text` for a thread that must not wait: what nobody takes within a moment is left unsaid.
// "": the status is taken away.
void SayOrGiveUp(std::string_view text);
// Text on stdout, flushed. Throws IoError.
void Print(std::string_view text);

}  // namespace colibri
