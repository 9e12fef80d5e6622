// What both programs do before anything else, so that nothing of a process's surroundings is taken
// for something else later. Threads: once a process, before any other thread exists.
#pragma once

namespace colibri {

struct ClosedStreams {
  bool input = false, output = false;
};

// Puts /dev/null in the place of standard streams that are closed (cron, daemons, `<&-`), so that
// no file opened later takes their numbers; returns which were. Raises the limit of open files as
// far as it goes. A file that reaches RLIMIT_FSIZE becomes an error of its write, like a full
// drive, and no signal that ends the process.
ClosedStreams PrepareProcess();

// Raises the stack limit as far as is wanted and allowed, threads' included. Throws IoError where
// it stays below a megabyte: below 300 kB programs were seen to end with a signal instead.
void RequireStack();

}  // namespace colibri
