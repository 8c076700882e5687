-- Prompts whose producers play them no more: they are to be played again under the same try, because nobody has ended
-- it, or their groups have ended, and how is still to be told.
-- KEYS  void, prompt_entries, prompt_again
-- ARGV  'again' or 'ended', then of each prompt: the prompt, its entry as it was read
-- Returns  number of those whose entry was still that
-- include prompts
local left = 0
for i = 2, #ARGV, 2 do
  local try, failures, nonce = read_entry(ARGV[i])
  if try and nonce ~= NOBODY and redis.call('HGET', keys.prompt_entries, ARGV[i]) == ARGV[i + 1] then
    left = left + 1
    if ARGV[1] == 'again' then
      play_again(ARGV[i], try, failures)
    else
      redis.call('HSET', keys.prompt_entries, ARGV[i], whole(try) .. ' ' .. whole(failures) .. ' ' .. GONE)
    end
  end
end
return left
