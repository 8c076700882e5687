-- In how many epochs running each prompt of a set that skips solved ones was solved: 1, 2 or 4 bits of a string for a
-- prompt, so that they count to `skip_solved` at least.
-- KEYS  prompt_solved
local function offset(at) return string.format('%d', at) end

-- The count of a prompt by its number among all, the most it can be, and where it is: byte, what that is now, factor in it.
local function solved_at(skip_solved, number)
  local bits = skip_solved == 1 and 1 or skip_solved <= 3 and 2 or 4
  local at, factor, values = math.floor(number * bits / 8), 2 ^ (number * bits % 8), 2 ^ bits
  local byte = string.byte(redis.call('GETRANGE', keys.prompt_solved, offset(at), offset(at))) or 0
  return math.floor(byte / factor) % values, values - 1, at, byte, factor
end

local function note_solved(skip_solved, number, is_solved)
  local before, most, at, byte, factor = solved_at(skip_solved, number)
  local count = is_solved and math.min(most, before + 1) or 0
  if count ~= before then
    redis.call('SETRANGE', keys.prompt_solved, offset(at), string.char(byte + (count - before) * factor))
  end
end
