-- Of prompts that were leased, end those that were solved in each of the last epochs: nobody has to play them. What was
-- begun before prompts were set back is played: what it was solved in may be the very group that a checkpoint has not.
-- KEYS  void, prompt_state, prompt_entries, prompt_solved
-- ARGV  in how many epochs running, then of each prompt: the prompt, its entry as it was leased, epoch, its number among
--       the prompts of all sources
-- Returns  for each prompt 1 if the caller has not to play it, else 0: it was ended, maybe by an earlier try of this call, or
--          the lease is no longer this one
-- include prompt_state
-- include prompt_solved
local skipped, skip_solved = {}, tonumber(ARGV[1])
for i = 2, #ARGV, 4 do
  local item = ARGV[i]
  local source, position = string.match(item, '^(%d+) (%d+)$')
  local is_leased = redis.call('HGET', keys.prompt_entries, item) == ARGV[i + 1]
  local is_solved = tonumber(position) >= number_of('back:' .. source)
    and solved_at(skip_solved, tonumber(ARGV[i + 3])) >= skip_solved
  skipped[#skipped + 1] = is_leased and not is_solved and 0 or 1
  if is_leased and is_solved then
    redis.call('HDEL', keys.prompt_entries, item)
    redis.pcall('HINCRBY', keys.prompt_state, 'skipped ' .. source .. ' ' .. ARGV[i + 2], 1)
  end
end
return skipped
