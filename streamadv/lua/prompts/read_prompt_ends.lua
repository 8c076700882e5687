-- Ends of prompts' groups in a shard, from the stream that the scripts write that end them.
-- KEYS  prompt_ends
-- ARGV  last entry that the caller knows, most to return
-- Returns  {entry, group, outcome, figures (see lib/prompt_end), ...}
local reply = {}
for _, entry in ipairs(redis.call('XRANGE', keys.prompt_ends, ARGV[1], '+', 'COUNT', ARGV[2] + 1)) do
  if entry[1] ~= ARGV[1] then
    for _, part in ipairs({entry[1], entry[2][2] or '', entry[2][4] or '', entry[2][6] or ''}) do reply[#reply + 1] = part end
  end
end
return reply
