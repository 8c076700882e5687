-- From now on prompts are begun in other shares, unless somebody has selected some for this period, or a later one.
-- KEYS  void, prompt_state
-- ARGV  period, then of each source its weight
-- Returns  1 if these are the shares now, else 0
-- include prompt_state
if tonumber(ARGV[1]) <= number_of('selected') then return 0 end
local changed = {'selected', ARGV[1]}
for i = 2, #ARGV do
  local source = i - 1
  changed[#changed + 1], changed[#changed + 2] = 'weight:' .. source, ARGV[i]
  changed[#changed + 1], changed[#changed + 2] = 'from:' .. source, string.format('%d', number_of('next:' .. source))
end
redis.call('HSET', keys.prompt_state, unpack(changed))
return 1
