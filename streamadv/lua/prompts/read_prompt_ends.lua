-- Ends of prompts' groups in a shard, from the stream that the scripts write that end them.
-- KEYS  prompt_ends
-- ARGV  last entry that the caller knows, most to return
-- Returns  {last entry of these, lines of ends (see lib/prompt_end), 1 if there are more, else 0}; the caller's entry and ''
--          if there is no other. All again if the stream has what is before that entry, but not itself: a server has lost
--          it, and the next one's clock may be behind
local last, ends = ARGV[1], {}
local function read(first) return redis.call('XRANGE', keys.prompt_ends, first, '+', 'COUNT', ARGV[2] + 1) end

local found = read(ARGV[1])
local has_known = found[1] and found[1][1] == ARGV[1]
if not has_known and #redis.call('XRANGE', keys.prompt_ends, '-', ARGV[1], 'COUNT', 1) > 0 then found = read('-') end
for _, entry in ipairs(found) do
  if entry[1] ~= ARGV[1] then
    last, ends[#ends + 1] = entry[1], entry[2][2]
  end
end
return {last, table.concat(ends, '\n'), #found > tonumber(ARGV[2]) and 1 or 0}
