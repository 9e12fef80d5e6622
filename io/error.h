// The exceptions of start-up. Each says which file, line or tensor, what was found and what was
// expected; main() turns the type into an exit code. After start-up nothing throws.
#pragma once

#include <stdexcept>
#include <string>

namespace colibri {

// Exit 3: the model directory, its config, tensors or tokenizer cannot be used.
struct ModelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Exit 4: reading or writing failed.
struct IoError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Exit 2: the command line asks for something that cannot be honoured.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The text of an errno; where a limit of the process is the reason, with its value and what changes
// it.
std::string Reason(int error);

}  // namespace colibri
