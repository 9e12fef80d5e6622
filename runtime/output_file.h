// OUT: the file that a run appends its records to. Owns the descriptor and the lock; knows how to
// read what an earlier run left, to mend its end, and to rewrite it as a whole. Bytes are appended
// by the output thread (runtime/output_writer.h) through Fd().
// Threads: one at a time, and nothing but Fd() while a run appends.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "runtime/finished_lines.h"

namespace colibri {

// What stands in OUT.
struct OutputScan {
  FinishedLines finished;
  RecordsEnd end;
};

class OutputFile {
 public:
  // Opens `path` for reading and appending, creates it if need be, and locks it; a second run on
  // the same file is refused. Not a regular file (a device, a FIFO): opened for writing, no lock.
  // Throws IoError: cannot be opened; "is being written by process N".
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  int Fd() const { return fd_; }
  const std::string& Path() const { return path_; }
  bool Regular() const { return regular_; }
  uint64_t Size() const;  // now; 0 for what is no regular file
  // The file system knows no locks: a line for the user; else "".
  const std::string& Note() const { return note_; }

  // Reads every record; see ForEachRecord for what may stand behind the last. Throws IoError for a
  // damaged line (its number), and for two records of an input line that differ in custom_id or
  // hash. Two that agree count as one.
  OutputScan Scan() const;
  // Cuts off and completes what the scan found, synced. Throws IoError.
  void Mend(const OutputScan& scan);
  // Empties the file, synced. Throws IoError.
  void Empty();

  // Removes the file if this object created it and nothing was written.
  void Discard();

  // Records written so far are found under a name, whatever was done to it meanwhile. A file that
  // was removed is written again; the line for the user that is returned says so, else it is "".
  // Where another file has the name (an editor that saved it), the records go to PATH.PID, and
  // that, as well as a file that was renamed, is an IoError that says where they are.
  std::string KeepNamed();

  // Rewrites the file without the records of failed lines (--retry-errors), all or nothing; the
  // lock is held throughout. Mended files only. Throws IoError.
  void DropFailed();
  // Rewrites the file in ascending order of lines, records of the same line as they stood, all or
  // nothing; does nothing if it is in order. 24 bytes a record. Mended files only. Throws IoError.
  void SortByLine();

  // Replaces the whole file by what `write` appends, all or nothing. `before_named` is called when
  // the new bytes are on the drive and have not taken the file's name yet. Whatever either throws
  // leaves the file as it was. Throws IoError, also where another file has the name now.
  using Append = std::function<void(std::string_view)>;
  void Replace(const std::function<void(const Append&)>& write,
               const std::function<void()>& before_named = {});

 private:
  std::string path_;
  int fd_ = -1;
  bool regular_ = false, created_ = false;
  std::string note_;
};

}  // namespace colibri
