// The fields of a cut that its kernel alone knows. A kernel declares each once, in a struct:
//
//   struct RowsFields {
//     int64_t split = 1;
//     static constexpr auto kAll = std::array{FieldOf<RowsFields>{"split", "kSplit", &RowsFields::split}};
//   };
//
// The list yields the schedule's fields, its JSON, what Python sees, and the variant's constants.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "../codegen/text.h"
#include "../schedule/proof.h"

namespace mpk {

template <class F>
struct FieldOf {
  const char* name;      // in schedules
  const char* constant;  // in the variant; null: code does not need it
  int64_t F::* value;
  bool is_flag = false;
};

template <class F>
std::vector<Field> list_fields(const F& fields) {
  std::vector<Field> list;
  for (const FieldOf<F>& field : F::kAll) list.push_back({field.name, fields.*field.value});
  return list;
}

// The fields of a cut. Throws std::runtime_error, as `validate` does, if it has others.
template <class F>
F fields_of(const Cut& cut) {
  F fields;
  bool is_sound = cut.fields.size() == F::kAll.size();
  for (size_t i = 0; is_sound && i < cut.fields.size(); i++) {
    is_sound = cut.fields[i].name == F::kAll[i].name;
    fields.*F::kAll[i].value = cut.fields[i].value;
  }
  if (!is_sound) unsound("a cut of " + cut.kernel + " does not have the fields of that kernel");
  return fields;
}

template <class F>
std::string constants(const F& fields) {
  std::string text;
  for (const FieldOf<F>& field : F::kAll)
    if (field.constant != nullptr)
      text += field.is_flag ? codegen::flag(field.constant, fields.*field.value != 0)
                            : codegen::constant(field.constant, fields.*field.value);
  return text;
}

}  // namespace mpk
