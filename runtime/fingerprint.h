// What a model is known by in a manifest. Reads some MB, not the weights: a model of 378 GB takes
// about as long as its headers. Threads: any.
#pragma once

#include <string>

#include "io/container.h"

namespace colibri {

// XXH3-128, 32 hex digits, over config.json, tokenizer.json and generation_config.json of the first
// directory, and for every shard: its base name, size, header and the 64 KiB in the middle of its
// data. Where the files lie does not count. Throws IoError.
std::string ModelFingerprint(const Container& container);

// The first shard that was written after the file `path`, "" if none was or there is no such file:
// a weight that changes outside of what the fingerprint reads shows in nothing else.
std::string ShardNewerThan(const Container& container, const std::string& path);

}  // namespace colibri
