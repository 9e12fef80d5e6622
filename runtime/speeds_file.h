// Speeds that were measured before, so that they are measured once: a JSON file of a rate for each
// drive and figures for each way of computing, by names that say all they depend on. A file that
// cannot be read or is of another version counts as empty; the oldest entries go first.
// Threads: any; two processes that write at once lose one of the entries.
#pragma once

#include <optional>
#include <string>

#include "runtime/prediction.h"

namespace colibri {

// $XDG_CACHE_HOME/colibri/speeds.json, else ~/.cache/colibri/speeds.json; "" without either.
std::string SpeedsPath();

struct RememberedSpeeds {
  std::optional<double> drive;
  std::optional<Speeds> computing;  // without the drive
};
RememberedSpeeds ReadSpeeds(const std::string& path, const std::string& drive_name,
                            const std::string& computing_name);

// Adds or replaces what is given; makes the folder. Throws IoError.
void RememberSpeeds(const std::string& path, const std::string& drive_name,
                    const std::string& computing_name, const RememberedSpeeds& speeds);

}  // namespace colibri
