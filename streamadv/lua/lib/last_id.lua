-- No clock gives an id above this (the year 287396). After the last possible id a stream takes no more entries.
local FARTHEST_MS = 2 ^ 53

-- Whether the last id of a stream is beyond what any clock gives.
local function is_at_end(stream)
  local info = redis.pcall('XINFO', 'STREAM', stream)
  for i = 1, info.err and 0 or #info, 2 do
    if info[i] == 'last-generated-id' then return tonumber(string.match(info[i + 1], '^%d+')) >= FARTHEST_MS end
  end
  return false
end
