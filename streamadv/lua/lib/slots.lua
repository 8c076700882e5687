-- Letters of slot maps and tombstones.

-- How many slots have this letter.
local function slots_with(group, letter)
  local _, n = string.gsub(group.slots, letter == '.' and '%.' or letter, '')
  return n
end

-- `text` with letters put at positions `offset + index` of members, whose indices ascend.
local function with_letters(text, offset, members, letter)
  local parts, at = {}, 1
  for _, member in ipairs(members) do
    local position = offset + member.index
    parts[#parts + 1] = string.sub(text, at, position - 1)
    parts[#parts + 1] = letter or member.letter
    at = position + 1
  end
  parts[#parts + 1] = string.sub(text, at)
  return table.concat(parts)
end
