-- Ends of prompts' groups in a shard, from the stream that the scripts write that end them.
-- KEYS  prompt_ends
-- ARGV  last entry that the caller knows, most to return
-- Returns  {last entry here, end (see lib/prompt_end), ...}; {} if there is no other
local reply = {}
for _, entry in ipairs(redis.call('XRANGE', keys.prompt_ends, ARGV[1], '+', 'COUNT', ARGV[2] + 1)) do
  if entry[1] ~= ARGV[1] then
    reply[1] = entry[1]
    reply[#reply + 1] = entry[2][2]
  end
end
return reply
