-- Lease the next prompt of a set to a producer: one that is to be played again, else the next one of the source that is
-- furthest behind its share.
-- KEYS  void, prompts, prompt_state, prompt_entries, prompt_again
-- ARGV  name, description of the set, 'lease', 'repeat' (the reply to the same call may have been lost) or 'ask' (lease
--       none), nonce of the call, owner, then of each source: number of its prompts over all epochs, weight
-- Returns  {'leased', prompt, entry}
--          {'some'}     there is one, and none was asked for
--          {'wait', n}  none is left, and n were begun and have not ended
--          {'over'}     all have ended
--          {'unknown'}  the run has no such set, or another one
-- include prompts
-- include prompt_state
local mode, nonce, owner = ARGV[3], ARGV[4], ARGV[5]
if redis.call('HGET', keys.prompts, ARGV[1]) ~= ARGV[2] then return {'unknown'} end

local function lease(item, try, failures)
  if mode == 'ask' then return {'some'} end
  local entry = table.concat({whole(try), whole(failures), nonce, owner}, ' ')
  redis.call('HSET', keys.prompt_entries, item, entry)
  note_try(try)
  return {'leased', item, entry}
end

if mode == 'repeat' then
  local flat = redis.call('HGETALL', keys.prompt_entries)
  for i = 1, #flat, 2 do
    if string.match(flat[i + 1], '^%d+ %d+ (%S+)') == nonce then return {'leased', flat[i], flat[i + 1]} end
  end
end

local again = redis.call('ZRANGE', keys.prompt_again, 0, 0)[1]
if again then
  local try, failures = read_entry(again)
  if mode ~= 'ask' then redis.call('ZREM', keys.prompt_again, again) end
  return lease(again, try or number_of('base'), failures or 0)
end

local sources, base = {}, number_of('base')
for i = 6, #ARGV, 2 do
  local source = #sources + 1
  sources[source] = {next = number_of('next:' .. source), total = tonumber(ARGV[i]), weight = tonumber(ARGV[i + 1])}
end
while true do
  local chosen, least
  for source, it in ipairs(sources) do
    local share = (it.next + 1) / it.weight
    if it.next < it.total and (not least or share < least) then chosen, least = source, share end
  end
  if not chosen then break end
  local it = sources[chosen]
  local item = chosen .. ' ' .. whole(it.next)
  local entry = redis.call('HGET', keys.prompt_entries, item)
  if entry or mode ~= 'ask' then redis.call('HSET', keys.prompt_state, 'next:' .. chosen, whole(it.next + 1)) end
  it.next = it.next + 1
  if not entry then return lease(item, base, 0) end
  if entry == 'ended' then redis.call('HDEL', keys.prompt_entries, item) end  -- else it was begun before it was set back
end
local left = redis.call('HLEN', keys.prompt_entries)
if left > 0 then return {'wait', left} end
return {'over'}
